"""Optional capabilities of text inputs and tokenizers. Callers must handle tokenizers and inputs without them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeGuard, runtime_checkable

from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.contracts.text import EncodesBatches, EncodesPrompts


@runtime_checkable
class HasTokenizer(Protocol):
    """A text input.

    Attributes:
        tokenizer: Tokenizer of the input.
    """

    tokenizer: Tokenizer


@runtime_checkable
class HasSpecialTokens(Protocol):
    """A tokenizer with special tokens.

    Attributes:
        special_tokens: Spelling of each special token by ID, such as `{0: "<s>"}`.
    """

    special_tokens: Mapping[int, str]


@runtime_checkable
class HasBosId(Protocol):
    """A tokenizer with a beginning-of-document (BOS) token.

    Attributes:
        bos_id: ID of the BOS token, or None if the model was trained without it.
    """

    bos_id: int | None


@runtime_checkable
class SpellsBos(Protocol):
    """A tokenizer that exposes its BOS token as a string.

    Attributes:
        bos_token: Spelling, such as `<s>`, or None if the tokenizer has no BOS token.
    """

    bos_token: str | None


@runtime_checkable
class SpellsEos(Protocol):
    """A tokenizer that exposes its end-of-document (EOS) token as a string.

    Attributes:
        eos_token: Spelling, such as `</s>`.
    """

    eos_token: str


@runtime_checkable
class HasName(Protocol):
    """A tokenizer with a name for use in messages.

    Attributes:
        name: Path of its file, or the name of a built-in tokenizer.
    """

    name: str


@runtime_checkable
class HasFolder(Protocol):
    """A tokenizer that was read from a file, whose folder may contain related files.

    Attributes:
        folder: Folder of the file, or None if the tokenizer is part of a package.
    """

    folder: str | None


@runtime_checkable
class HasAddedTokens(Protocol):
    """A tokenizer whose vocabulary was extended after the model was created.

    Attributes:
        added_tokens: Spelling of each added token by ID. The model may not have embeddings for them.
    """

    added_tokens: Mapping[int, str]


def tokenizer_of(source: object) -> Tokenizer | None:
    """Return the tokenizer of an input, or None if it is not a text input."""
    return source.tokenizer if isinstance(source, HasTokenizer) else None


def special_tokens_of(tokenizer: Tokenizer) -> Mapping[int, str]:
    """Return the spelling of each special token by ID. The mapping is empty if they are unknown."""
    return tokenizer.special_tokens if isinstance(tokenizer, HasSpecialTokens) else {}


def first_token(tokenizer: Tokenizer) -> int:
    """Return the first token of a document: the BOS token, or the EOS token if the tokenizer has no BOS token."""
    bos = bos_id_of(tokenizer)
    return tokenizer.eos_id if bos is None else bos


def bos_id_of(tokenizer: object) -> int | None:
    """Return the ID of the BOS token, or None."""
    return tokenizer.bos_id if isinstance(tokenizer, HasBosId) else None


def bos_token_of(tokenizer: object) -> str | None:
    """Return the spelling of the BOS token, or None if it does not exist or is unknown."""
    return tokenizer.bos_token if isinstance(tokenizer, SpellsBos) else None


def folder_of(tokenizer: object) -> str | None:
    """Return the folder that a tokenizer was read from, or None if it is part of a package or unknown."""
    return tokenizer.folder if isinstance(tokenizer, HasFolder) else None


def summarize_tokenizer(tokenizer: Tokenizer) -> str:
    """Return the name, the size and the end-of-document token of a tokenizer, for the user."""
    name = tokenizer.name if isinstance(tokenizer, HasName) else type(tokenizer).__name__
    end = f"{tokenizer.eos_token!r}" if isinstance(tokenizer, SpellsEos) else f"token {tokenizer.eos_id}"
    bos = bos_token_of(tokenizer)
    begin = "" if bos is None else f"begin with {bos!r} and "
    return f"{name}: {tokenizer.vocab_size:,} tokens, documents {begin}end with {end}"


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token IDs of a prompt; see `EncodesPrompts`."""
    return tokenizer.encode_prompt(text) if isinstance(tokenizer, EncodesPrompts) else tokenizer.encode(text)


def encodes_batches(tokenizer: object) -> TypeGuard[EncodesBatches]:
    """Return True if `encode_batch` is consistent with `encode`. It is not if a subclass only overrides `encode`."""
    classes = type(tokenizer).__mro__
    single, batch = (next((c for c in classes if n in vars(c)), None) for n in ("encode", "encode_batch"))
    return single is not None and batch is not None and issubclass(batch, single)
