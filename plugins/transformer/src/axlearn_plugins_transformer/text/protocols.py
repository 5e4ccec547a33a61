"""What an input and a tokenizer of text may have in addition to their contracts. Callers go without what is absent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeGuard, runtime_checkable

from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.contracts.text import EncodesBatches, EncodesPrompts


@runtime_checkable
class HasTokenizer(Protocol):
    """An input of text.

    Attributes:
        tokenizer: turns its text into tokens.
    """

    tokenizer: Tokenizer


@runtime_checkable
class HasSpecialTokens(Protocol):
    """A tokenizer with tokens that stand for no text.

    Attributes:
        special_tokens: id -> spelling, such as `{0: "<s>"}`.
    """

    special_tokens: Mapping[int, str]


@runtime_checkable
class HasBosId(Protocol):
    """A tokenizer with a token that begins documents.

    Attributes:
        bos_id: its id, or None if the model was trained without it.
    """

    bos_id: int | None


@runtime_checkable
class SpellsBos(Protocol):
    """A tokenizer that knows the text of the token that begins documents.

    Attributes:
        bos_token: such as `<s>`, or None if there is none.
    """

    bos_token: str | None


@runtime_checkable
class SpellsEos(Protocol):
    """A tokenizer that knows the text of the token that ends documents.

    Attributes:
        eos_token: such as `</s>`.
    """

    eos_token: str


@runtime_checkable
class HasFolder(Protocol):
    """A tokenizer that was read from a file, beside which others may lie.

    Attributes:
        folder: of the file, or None if it came with a package.
    """

    folder: str | None


@runtime_checkable
class HasAddedTokens(Protocol):
    """A tokenizer whose vocabulary was extended after the model was made.

    Attributes:
        added_tokens: id -> spelling. The model may lack rows for them.
    """

    added_tokens: Mapping[int, str]


def tokenizer_of(source: object) -> Tokenizer | None:
    """Of a built input; None where it has no text."""
    return source.tokenizer if isinstance(source, HasTokenizer) else None


def special_tokens_of(tokenizer: Tokenizer) -> Mapping[int, str]:
    """Id -> spelling of a tokenizer's special tokens; empty if it does not tell."""
    return tokenizer.special_tokens if isinstance(tokenizer, HasSpecialTokens) else {}


def first_token(tokenizer: Tokenizer) -> int:
    """The token that a document begins with: the BOS token, or the end-of-document token if there is none."""
    bos = bos_id_of(tokenizer)
    return tokenizer.eos_id if bos is None else bos


def bos_id_of(tokenizer: object) -> int | None:
    """The id of the token that begins documents; None if there is none."""
    return tokenizer.bos_id if isinstance(tokenizer, HasBosId) else None


def bos_token_of(tokenizer: object) -> str | None:
    """The text of the token that begins documents; None if there is none, or the tokenizer cannot tell."""
    return tokenizer.bos_token if isinstance(tokenizer, SpellsBos) else None


def folder_of(tokenizer: object) -> str | None:
    """The folder that a tokenizer was read from; None if it came with a package, or cannot tell."""
    return tokenizer.folder if isinstance(tokenizer, HasFolder) else None


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a prompt; see `EncodesPrompts`."""
    return tokenizer.encode_prompt(text) if isinstance(tokenizer, EncodesPrompts) else tokenizer.encode(text)


def encodes_batches(tokenizer: object) -> TypeGuard[EncodesBatches]:
    """Whether its `encode_batch` belongs to its `encode`: not where a subclass has another `encode` only."""
    classes = type(tokenizer).__mro__
    one, many = (next((c for c in classes if n in vars(c)), None) for n in ("encode", "encode_batch"))
    return one is not None and many is not None and issubclass(many, one)
