"""Text generation.

Prefill the prompt, then run one compiled decode step per token. Each step updates the cache in place.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import index
from typing import Any, Protocol, runtime_checkable

import attrs
import jax
import numpy as np

from axlearn_core.compose import Program
from axlearn_core.compose.model_program import ModelProgram, with_program
from axlearn_core.errors import RequestError
from axlearn_plugins_transformer.cache_spec import check_prefix, read_prefix
from axlearn_plugins_transformer.extras import check_extras, check_used, extra_shapes, find_used
from axlearn_plugins_transformer.functions import Draw, GenerationBucket, GenerationFunctions

SMALLEST_PROMPT = 16
"""Prompts are padded to at least this length and to a power of two, so that few lengths are compiled."""
CACHE_STEP = 128
"""Cache lengths are multiples of this number, so that few lengths are compiled."""


@runtime_checkable
class HasEndTokens(Protocol):
    """A model with end tokens.

    Attributes:
        end_tokens: Ids that end an output of `generate`, in addition to its `eos_id`.
    """

    end_tokens: Collection[int]


class Generator:
    """Generates tokens with one model.

    Splits the weights into layers once, and compiles once per length.

    Args:
        model: A `CausalLM`.
        program: Program of the model's experiment (default: a new one for one device).
    """

    def __init__(self, model: Any, program: Program | ModelProgram | None = None):
        self.vocab_size = model.vocab_size
        self.end_tokens = frozenset(model.end_tokens if isinstance(model, HasEndTokens) else ())
        self.program, weights = with_program(model, program)
        self.arrays = self.program.compile("unstack")(weights)
        self.functions = GenerationFunctions(self.program.functional.describe())
        self._checked: set[GenerationBucket] = set()
        self.prefix = read_prefix(self.functions.bind(self.functions.specs).cache_spec())

    def __call__(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        eos_id: int | Collection[int] | None = None,
        top_k: int | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> Iterator[int]:
        """Yield up to `max_tokens` tokens.

        Stop before `eos_id` or an end token of the model.

        Args:
            prompt_ids: At least one token.
            max_tokens: Maximum number of tokens.
            temperature: 0 always takes the most probable token. Otherwise, tokens are sampled from
                softmax(logits / temperature).
            seed: Seed for sampling.
            eos_id: One end token or several. None ignores end tokens and generates `max_tokens` tokens.
            top_k: Number of most probable tokens to sample from (default: all).
            extras: Other inputs of the model by name, [1, ...] each. The model's `embed` and its layers get them with the prompt.

        Raises:
            RequestError: The prompt is empty, or shorter than the model's prefix. A token is not in the vocabulary, a number is
                out of range, or an extra does not have one row, is an entry of text, or has no effect on the model.
        """
        vocab = self.vocab_size
        unknown = [t for t in prompt_ids if not _is_token(t, vocab)]
        if not prompt_ids:
            raise RequestError("cannot generate: the prompt is empty")
        if unknown:
            raise RequestError(f"cannot generate: the model has no token {unknown[0]}; its ids are 0 to {vocab - 1}")
        check_prefix(len(prompt_ids), self.prefix)
        if temperature < 0 or max_tokens < 0 or (top_k is not None and not 1 <= top_k <= vocab):
            raise RequestError(
                "cannot generate: expected temperature >= 0, max_tokens >= 0 and 1 <= top_k <= vocabulary, "
                f"got temperature={temperature}, max_tokens={max_tokens}, top_k={top_k}"
            )
        end_tokens = (
            frozenset() if eos_id is None else self.end_tokens | ({eos_id} if isinstance(eos_id, int) else set(eos_id))
        )
        arrays = check_extras(extras or {})
        bucket = _choose_bucket(len(prompt_ids), max_tokens, arrays)
        if temperature > 0:
            bucket = attrs.evolve(bucket, sampled=True, top_k=top_k)
        self._check_used(bucket)
        return self._tokens(list(prompt_ids), max_tokens, temperature, seed, end_tokens, bucket, arrays)

    def _tokens(
        self,
        prompt: list[int],
        max_tokens: int,
        temperature: float,
        seed: int,
        end_tokens: Collection[int],
        bucket: GenerationBucket,
        extras: Mapping[str, np.ndarray],
    ) -> Iterator[int]:
        padded, sampled = bucket.prompt, bucket.sampled
        step_bucket = attrs.evolve(bucket, prompt=0, extras=())
        cache, token = self.functions.init_cache(bucket), np.int32(0)
        key, scale = jax.random.key(seed), np.float32(temperature)
        for count in range(max_tokens):
            draw = Draw(key, np.int32(count), scale) if sampled else None
            if count == 0:
                tokens = np.asarray([prompt + [0] * (padded - len(prompt))], np.int32)
                prefill = self.program.compile("prefill", bucket)
                token, cache = prefill(self.arrays, cache, tokens, np.int32(len(prompt)), dict(extras), draw)
            else:
                token, cache = self.program.compile("decode", step_bucket)(self.arrays, cache, token, draw)
            if (token_id := int(token)) in end_tokens:
                return
            yield token_id

    def _check_used(self, bucket: GenerationBucket) -> None:
        """Raise `RequestError` for an extra that has no effect on the prefill of a bucket."""
        if not bucket.extras or bucket in self._checked:
            return
        jaxpr = self.program.trace("prefill", bucket).jaxpr.jaxpr
        *before, extras, _ = self.program.arguments("prefill", bucket)
        check_used(extras, find_used(jaxpr, before, extras))
        self._checked.add(bucket)


def _choose_bucket(prompt: int, max_tokens: int, extras: Mapping[str, np.ndarray]) -> GenerationBucket:
    """Return the sizes to compile for the length of a prompt, without sampling."""
    padded = max(SMALLEST_PROMPT, 1 << (prompt - 1).bit_length())
    length = -(-max(padded, prompt + max_tokens) // CACHE_STEP) * CACHE_STEP
    return GenerationBucket(padded, length, extras=extra_shapes(extras))


def _is_token(value: Any, vocab_size: int) -> bool:
    """Return True if a value is an integer for which the vocabulary has a token."""
    try:
        return 0 <= index(value) < vocab_size
    except TypeError:  # such as 1.5
        return False


def generate(
    model: Any,
    prompt_ids: Sequence[int],
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    eos_id: int | Collection[int] | None = None,
    top_k: int | None = None,
    extras: Mapping[str, Any] | None = None,
    program: Program | None = None,
) -> Iterator[int]:
    """Yield the tokens that follow a prompt. For several prompts, create a `Generator` and reuse it."""
    return Generator(model, program)(
        prompt_ids,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        eos_id=eos_id,
        top_k=top_k,
        extras=extras,
    )
