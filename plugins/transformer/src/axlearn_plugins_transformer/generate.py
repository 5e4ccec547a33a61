"""Text generation: prefill of the whole prompt, then one compiled decode step per token, which updates the cache in place."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import jax
import numpy as np

from axlearn_core.compose import Program
from axlearn_core.compose.model_program import ModelProgram, with_program
from axlearn_core.errors import RequestError
from axlearn_plugins_transformer.functions import Draw, GenerationBucket, GenerationFunctions

SMALLEST_PROMPT = 16
"""Prompts are padded to this length or the next power of two, so that few lengths are compiled."""
CACHE_STEP = 128
"""Caches have a multiple of this length, for the same reason."""


@runtime_checkable
class HasEndTokens(Protocol):
    """A model that names the tokens that end its outputs.

    Attributes:
        end_tokens: ids that end an output of `generate`, in addition to its `eos_id`.
    """

    end_tokens: Collection[int]


class Generator:
    """Generates tokens with one model. Splits its weights by layer once, and compiles once for equal lengths.

    Args:
        model: a `CausalLM`.
        program: the program of the model's experiment; by default a new one for one device.
    """

    def __init__(self, model: Any, program: Program | ModelProgram | None = None):
        self.vocab_size = model.vocab_size
        self.end_tokens = frozenset(model.end_tokens if isinstance(model, HasEndTokens) else ())
        self.program, weights = with_program(model, program)
        self.arrays = self.program.compile("unstack")(weights)
        self.functions = GenerationFunctions(self.program.functional.describe())

    def __call__(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        eos_id: int | Collection[int] | None = None,
        top_k: int | None = None,
    ) -> Iterator[int]:
        """Yields up to `max_tokens` tokens as they come, ending before `eos_id` and the model's own end tokens.

        Args:
            prompt_ids: at least one token.
            max_tokens: how many at most.
            temperature: 0 always takes the likeliest token; above it, tokens are drawn from
                softmax(logits / temperature).
            seed: equal seeds draw equal tokens.
            eos_id: the token that ends a text, or several; None goes on to `max_tokens`.
            top_k: draws from the `top_k` likeliest tokens only.

        Raises:
            RequestError: an empty prompt, a token that the model does not have, or a number out of range.
        """
        vocab = self.vocab_size
        wrong = [t for t in prompt_ids if not 0 <= t < vocab]
        if not prompt_ids:
            raise RequestError("cannot generate: the prompt has no token")
        if wrong:
            raise RequestError(f"cannot generate: the model has no token {wrong[0]}; its ids are 0 to {vocab - 1}")
        if temperature < 0 or max_tokens < 0 or (top_k is not None and not 1 <= top_k <= vocab):
            raise RequestError(
                "cannot generate: expected temperature >= 0, max_tokens >= 0 and 1 <= top_k <= vocabulary, "
                f"got temperature={temperature}, max_tokens={max_tokens}, top_k={top_k}"
            )
        ends = (
            frozenset() if eos_id is None else self.end_tokens | ({eos_id} if isinstance(eos_id, int) else set(eos_id))
        )
        return self._tokens(list(prompt_ids), max_tokens, temperature, seed, ends, top_k)

    def _tokens(
        self,
        prompt: list[int],
        max_tokens: int,
        temperature: float,
        seed: int,
        ends: Collection[int],
        top_k: int | None,
    ) -> Iterator[int]:
        padded = max(SMALLEST_PROMPT, 1 << (len(prompt) - 1).bit_length())
        length = -(-max(padded, len(prompt) + max_tokens) // CACHE_STEP) * CACHE_STEP
        sampled = temperature > 0
        bucket = GenerationBucket(padded, length, sampled, top_k if sampled else None)
        step_bucket = attrs.evolve(bucket, prompt=0)
        cache, token = self.functions.init_cache(bucket), np.int32(0)
        key, heat = jax.random.key(seed), np.float32(temperature)
        for index in range(max_tokens):
            draw = Draw(key, np.int32(index), heat) if sampled else None
            if index == 0:
                tokens = np.asarray([prompt + [0] * (padded - len(prompt))], np.int32)
                prefill = self.program.compile("prefill", bucket)
                token, cache = prefill(self.arrays, cache, tokens, np.int32(len(prompt)), draw)
            else:
                token, cache = self.program.compile("decode", step_bucket)(self.arrays, cache, token, draw)
            if (token_id := int(token)) in ends:
                return
            yield token_id


def generate(
    model: Any,
    prompt_ids: Sequence[int],
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    eos_id: int | Collection[int] | None = None,
    top_k: int | None = None,
    program: Program | None = None,
) -> Iterator[int]:
    """Tokens that follow a prompt; see `Generator`, which is better for more than one prompt."""
    return Generator(model, program)(
        prompt_ids, max_tokens=max_tokens, temperature=temperature, seed=seed, eos_id=eos_id, top_k=top_k
    )
