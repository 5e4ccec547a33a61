"""Text generation: the prompt in one call, then one compiled step per token with the cache updated in place."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from axlearn_core.errors import RequestError
from axlearn_core.nn.layer import Context

SMALLEST_PROMPT = 16
"""Prompts are padded to this length or the next power of two, so that few lengths are compiled."""
CACHE_STEP = 128
"""Caches have a multiple of this length, for the same reason."""


class _Draw(NamedTuple):
    """How the next token is drawn; all zero-dimensional arrays."""

    key: jax.Array
    number: jax.Array  # int32, counts the tokens
    temperature: jax.Array  # float32


def _pick(logits: jax.Array, draw: _Draw | None, top_k: int | None) -> jax.Array:
    """[V] -> an int32 token: the likeliest one, or a random one."""
    if draw is None:
        return jnp.argmax(logits).astype(jnp.int32)
    logits = logits.astype(jnp.float32) / draw.temperature
    if top_k is not None:
        logits = jnp.where(logits >= lax.top_k(logits, top_k)[0][-1], logits, -jnp.inf)
    return jax.random.categorical(jax.random.fold_in(draw.key, draw.number), logits).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("graph", "top_k"), donate_argnames=("cache",))
def _prefill(
    state: Any, cache: Any, tokens: jax.Array, length: jax.Array, draw: _Draw | None, *, graph: Any, top_k: int | None
) -> tuple[jax.Array, Any]:
    """The token that follows the first `length` of [1, S], and the cache with just those in it."""
    model = nnx.merge(graph, state)
    hidden, cache = model.decoder(tokens, Context(), cache)
    last = lax.dynamic_slice_in_dim(hidden, length - 1, 1, axis=1)
    return _pick(model.logits(last)[0, 0], draw, top_k), dataclasses.replace(cache, length=length)


@functools.partial(jax.jit, static_argnames=("graph", "top_k"), donate_argnames=("cache",))
def _step(
    state: Any, cache: Any, token: jax.Array, draw: _Draw | None, *, graph: Any, top_k: int | None
) -> tuple[jax.Array, Any]:
    """The token after `token`, and the cache with `token` in it."""
    logits, cache = nnx.merge(graph, state)(token[None, None], cache=cache)
    return _pick(logits[0, 0], draw, top_k), cache


class Generator:
    """Generates from one model. Its weights are taken apart by layer once, and equal lengths compile once.

    Args:
        model: a `CausalLM`.
    """

    def __init__(self, model: Any):
        self.model = model.unstacked()
        self.graph, self.state = nnx.split(self.model)

    def __call__(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        eos_id: int | None = None,
        top_k: int | None = None,
    ) -> Iterator[int]:
        """Yields up to `max_tokens` tokens as they come, ending before `eos_id`.

        Args:
            prompt_ids: at least one token.
            max_tokens: how many at most.
            temperature: 0 always takes the likeliest token; above it, tokens are drawn from softmax(logits /
            temperature). seed: equal seeds draw equal tokens.
            eos_id: the token that ends a text; None goes on to `max_tokens`.
            top_k: draws from the `top_k` likeliest tokens only.

        Raises:
            RequestError: an empty prompt, a token that the model does not have, or a number out of range.
        """
        vocab = self.model.cfg.vocab_size
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
        return self._tokens(list(prompt_ids), max_tokens, temperature, seed, eos_id, top_k)

    def _tokens(
        self, prompt: list[int], max_tokens: int, temperature: float, seed: int, eos_id: int | None, top_k: int | None
    ) -> Iterator[int]:
        padded = max(SMALLEST_PROMPT, 1 << (len(prompt) - 1).bit_length())
        cache = self.model.init_cache(1, -(-max(padded, len(prompt) + max_tokens) // CACHE_STEP) * CACHE_STEP)
        key, heat = jax.random.key(seed), jnp.float32(temperature)
        top_k = top_k if temperature > 0 else None
        token = jnp.zeros((), jnp.int32)
        for index in range(max_tokens):
            draw = _Draw(key, jnp.int32(index), heat) if temperature > 0 else None
            if index == 0:
                tokens = jnp.asarray([prompt + [0] * (padded - len(prompt))], jnp.int32)
                length = jnp.int32(len(prompt))
                token, cache = _prefill(self.state, cache, tokens, length, draw, graph=self.graph, top_k=top_k)
            else:
                token, cache = _step(self.state, cache, token, draw, graph=self.graph, top_k=top_k)
            if (found := int(token)) == eos_id:
                return
            yield found


def generate(
    model: Any,
    prompt_ids: Sequence[int],
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    eos_id: int | None = None,
    top_k: int | None = None,
) -> Iterator[int]:
    """Tokens that follow a prompt; see `Generator`, which is better for more than one prompt."""
    return Generator(model)(
        prompt_ids, max_tokens=max_tokens, temperature=temperature, seed=seed, eos_id=eos_id, top_k=top_k
    )
