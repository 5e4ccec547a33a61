"""Contracts of text: what a tokenizer may do in addition to its protocol, and the facts that a model brings.

Callers ask with `isinstance` and go without a capability otherwise. The suite for tokenizers checks each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

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


def digest_of(tokenizer: Tokenizer) -> str:
    """What tells a tokenizer from others: its digest, or at least its class."""
    return tokenizer.digest if isinstance(tokenizer, HasDigest) else type(tokenizer).__name__
