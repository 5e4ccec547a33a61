"""Contracts of text: what a tokenizer may do in addition to its protocol, and the facts that a model brings.

Callers ask with `isinstance` and go without a capability otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeGuard, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

    from axlearn_core.contracts.parts import Tokenizer


class TextFacts(Protocol):
    """How the text of a model becomes tokens, and what ends an output.

    Attributes:
        tokenizer: of the model.
        end_tokens: ids that end an output.
        context_length: tokens that the model was made for; None if nothing says.
    """

    tokenizer: Tokenizer
    end_tokens: Collection[int]
    context_length: int | None


@runtime_checkable
class EncodesPrompts(Protocol):
    """A tokenizer that encodes prompts otherwise than documents: with a BOS token, with special tokens."""

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a prompt. A BOS token comes first, unless the text spells it out itself."""
        ...


@runtime_checkable
class EncodesSpecialTokens(Protocol):
    """A tokenizer that reads its special tokens in text, for chat templates."""

    def encode_special(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """(ids, [begin, end) of each in `text`); `<|im_end|>` and the like become their own ids."""
        ...


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


@runtime_checkable
class EncodesBatches(Protocol):
    """A tokenizer that is faster with several texts at once, as it takes several cores to them."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """What `encode` gives for each text; raises `InputError` where `encode` does for any of the texts."""
        ...


@runtime_checkable
class CountsBytes(Protocol):
    """A tokenizer that knows the length of each token."""

    def token_bytes(self) -> np.ndarray:
        """float32 [vocab_size]: bytes of text that each token stands for; 0 for special tokens."""
        ...


@runtime_checkable
class HasDigest(Protocol):
    """A tokenizer that can be told from others.

    Attributes:
        digest: equal for equal tokenizers, in any process.
    """

    digest: str


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


def digest_of(tokenizer: Tokenizer) -> str:
    """What tells a tokenizer from others: its digest, or at least its class."""
    return tokenizer.digest if isinstance(tokenizer, HasDigest) else type(tokenizer).__name__


def encodes_batches(tokenizer: object) -> TypeGuard[EncodesBatches]:
    """Whether its `encode_batch` belongs to its `encode`: not where a subclass has another `encode` only."""
    classes = type(tokenizer).__mro__
    one, many = (next((c for c in classes if n in vars(c)), None) for n in ("encode", "encode_batch"))
    return one is not None and many is not None and issubclass(many, one)
