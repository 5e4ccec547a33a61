"""Optional capabilities of tokenizers, and the text facts of a model.

Callers test for a capability with `isinstance`, and also support tokenizers without it. The conformance suite checks each
capability.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

    from axlearn_core.contracts.parts import Tokenizer


class TextFacts(Protocol):
    """Facts about the text that a model reads and writes.

    Attributes:
        tokenizer: Tokenizer of the model.
        end_tokens: IDs of the tokens that end an output.
        context_length: Maximum number of tokens that the model was trained for, or None if unknown.
    """

    tokenizer: Tokenizer
    end_tokens: Collection[int]
    context_length: int | None


@runtime_checkable
class EncodesPrompts(Protocol):
    """A tokenizer that encodes prompts differently from documents, with a BOS token or special tokens."""

    def encode_prompt(self, text: str) -> list[int]:
        """Return the IDs of a prompt. Prepend the BOS token, unless the text already starts with it."""
        ...


@runtime_checkable
class EncodesSpecialTokens(Protocol):
    """A tokenizer that recognizes special tokens in text, for chat templates."""

    def encode_special(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the IDs and the range [begin, end) of each in `text`. Convert special tokens such as `<|im_end|>` to their IDs."""
        ...


@runtime_checkable
class EncodesBatches(Protocol):
    """A tokenizer that encodes several texts in parallel."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the IDs of each text, as `encode` does. Raise `InputError` if `encode` raises it for one of them."""
        ...


@runtime_checkable
class CountsBytes(Protocol):
    """A tokenizer that reports the number of bytes in each token."""

    def token_bytes(self) -> np.ndarray:
        """Return the bytes of text per token, float32 [vocab_size]. Special tokens have 0."""
        ...


@runtime_checkable
class HasDigest(Protocol):
    """A tokenizer with an identifier.

    Attributes:
        digest: Hash that is equal for equal tokenizers, in any process.
    """

    digest: str


def get_digest(tokenizer: Tokenizer) -> str:
    """Return the digest of a tokenizer, or the name of its class if it has none."""
    return tokenizer.digest if isinstance(tokenizer, HasDigest) else type(tokenizer).__name__
