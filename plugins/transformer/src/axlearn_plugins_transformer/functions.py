"""The functions of a causal language model other than its loss.

A program compiles and calls these functions: `score`, `unstack`, `prefill` and `decode`.

Legend: B rows, S tokens of a row, C positions of a chunk, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from axlearn_core.compose import Array, Function
from axlearn_core.nn.layer import Context

Arrays = dict[str, jax.Array]


@attrs.frozen
class ScoreBucket:
    """The shapes with which `score` is compiled.

    Attributes:
        rows: B.
        length: S.
        chunk: Positions per row whose logits are in memory at a time.
    """

    rows: int
    length: int
    chunk: int


@attrs.frozen
class GenerationBucket:
    """The shapes with which `prefill` and `decode` are compiled, for one row.

    Attributes:
        prompt: Length of the padded prompt; 0 in `decode`.
        cache: Capacity of the cache, in tokens.
        sampled: Whether to sample tokens. If False, decoding is greedy.
        top_k: Number of most probable tokens to sample from, or None for all.
        extras: Name, shape and dtype of each other input of the prompt.
    """

    prompt: int
    cache: int
    sampled: bool = False
    top_k: int | None = None
    extras: tuple[tuple[str, tuple[int, ...], str], ...] = ()


class Draw(NamedTuple):
    """Sampling parameters for the next token, as zero-dimensional arrays.

    Attributes:
        key: Typed random key.
        number: Index of the token, int32.
        temperature: Sampling temperature, float32.
    """

    key: Any
    number: Any
    temperature: Any


def pick(logits: jax.Array, draw: Draw | None, top_k: int | None) -> jax.Array:
    """Select the next token from the logits [V].

    Take the most probable token, or a random sample if `draw` is given. Return it as int32.
    """
    if draw is None:
        return jnp.argmax(logits).astype(jnp.int32)
    logits = logits.astype(jnp.float32) / draw.temperature
    if top_k is not None:
        logits = jnp.where(logits >= lax.top_k(logits, top_k)[0][-1], logits, -jnp.inf)
    return jax.random.categorical(jax.random.fold_in(draw.key, draw.number), logits).astype(jnp.int32)


class GenerationFunctions:
    """The functions `unstack`, `prefill` and `decode` of one model.

    Generation uses separate layers (`CausalLM.unstacked`), because slicing stacked weights at every step is slow.
    `unstack` splits the weights of the model once.
    """

    def __init__(
        self, model: Any, edit: Callable[[Any], None] = lambda _: None, *, stacked: bool = False, **options: Any
    ):
        """Trace a `CausalLM` with abstract arrays.

        Args:
            model: The model.
            edit: Modifies the model with separate layers in place.
            stacked: Whether the layers stay stacked.
            options: Arguments of the model's `unstacked`.
        """
        self._edit, self._stacked, self._options = edit, stacked, options
        graph, state = nnx.split(model)
        structure: list[Any] = []

        def separate(state: Any) -> Arrays:
            structure[:] = nnx.split(self._separate(nnx.merge(graph, state)))
            return _flat(structure[1])

        self.specs = jax.eval_shape(separate, state)
        self._graph, template = structure
        self._template = nnx.to_flat_state(template)
        self._axes = {_path(k): _axes(v, self.specs[_path(k)].ndim) for k, v in self._template}

    def declare(self) -> Mapping[str, Function]:
        """Return the functions by name."""
        arrays = {path: Array(s.shape, s.dtype, self._axes[path], f"model ({path})") for path, s in self.specs.items()}

        def inputs(bucket: GenerationBucket, **extra: Any) -> tuple[Any, ...]:
            scalar, key = Array((), jnp.int32), jax.eval_shape(lambda: jax.random.key(0))
            draw = Draw(Array((), key.dtype), scalar, Array((), jnp.float32)) if bucket.sampled else None
            return arrays, self._cache(bucket), *extra.values(), draw

        def outputs(bucket: GenerationBucket) -> Any:
            return Array((), jnp.int32), self._cache(bucket)

        scalar = Array((), jnp.int32)
        return {
            "unstack": Function(
                call=self.separate_arrays,
                outputs=lambda _: arrays,
                runs_once=True,
                describe="split the stacked weights into separate layers for `prefill` and `decode`",
            ),
            "prefill": Function(
                call=self.prefill,
                inputs=lambda b: inputs(
                    b,
                    tokens=Array((1, b.prompt), jnp.int32),
                    length=scalar,
                    extras={name: Array(shape, dtype) for name, shape, dtype in b.extras},
                ),
                get_bucket=lambda batch: GenerationBucket(batch["tokens"].shape[1], batch["tokens"].shape[1]),
                outputs=outputs,
                donate=(1,),
                takes_model=False,
                takes_bucket=True,
                describe="write a prompt to the cache and return the next token",
            ),
            "decode": Function(
                call=self.decode,
                inputs=lambda b: inputs(b, token=scalar),
                get_bucket=lambda batch: GenerationBucket(0, batch["tokens"].shape[1]),
                outputs=outputs,
                donate=(1,),
                takes_model=False,
                takes_bucket=True,
                describe="write a token to the cache and return the next token",
            ),
        }

    def prefill(
        self,
        arrays: Arrays,
        cache: Any,
        tokens: jax.Array,
        length: jax.Array,
        extras: Arrays,
        draw: Draw | None,
        bucket: GenerationBucket,
    ) -> tuple[jax.Array, Any]:
        """Return the token after the prompt, and the cache that contains the prompt.

        The prompt is the first `length` tokens of [1, S]. `extras` are the other inputs of the model, [1, ...] each.
        """
        model = self.bind(arrays)
        real = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < length
        hidden, cache = model.hidden_states({"tokens": tokens, **extras}, Context(real=real, extras=extras), cache)
        last = lax.dynamic_slice_in_dim(hidden, length - 1, 1, axis=1)
        return pick(model.logits(last)[0, 0], draw, bucket.top_k), dataclasses.replace(cache, length=length)

    def decode(
        self, arrays: Arrays, cache: Any, token: jax.Array, draw: Draw | None, bucket: GenerationBucket
    ) -> tuple[jax.Array, Any]:
        """Return the token after `token`, and the cache that contains `token`."""
        logits, cache = self.bind(arrays)(token[None, None], cache=cache)
        return pick(logits[0, 0], draw, bucket.top_k), cache

    def init_cache(self, bucket: GenerationBucket) -> Any:
        """Return an empty cache for one row."""
        return self.bind(self.specs).init_cache(1, bucket.cache)

    def _cache(self, bucket: GenerationBucket) -> Any:
        return jax.tree.map(lambda s: Array(s.shape, s.dtype), jax.eval_shape(lambda: self.init_cache(bucket)))

    def separate_arrays(self, model: Any) -> Arrays:
        """Return the arrays of a model with separate layers, by path."""
        return _flat(nnx.state(self._separate(model)))

    def _separate(self, model: Any) -> Any:
        separate = nnx.merge(*nnx.split(model)) if self._stacked else model.unstacked(**self._options)
        self._edit(separate)
        return separate

    def bind(self, arrays: Mapping[str, Any]) -> Any:
        """Return the model with separate layers, using the arrays from `unstack`."""
        values = [(k, v.replace(arrays[_path(k)])) for k, v in self._template]
        return nnx.merge(self._graph, nnx.from_flat_state(values))


def score(
    model: Any, tokens: jax.Array, targets: jax.Array, counted: jax.Array, bucket: ScoreBucket
) -> tuple[jax.Array, jax.Array]:
    """Compute the log-likelihood of targets, and whether greedy decoding produces them.

    Args:
        model: A `CausalLM`.
        tokens: int32 [B, S].
        targets: int32 [B, S].
        counted: Mask of the targets to include, bool [B, S].
        bucket: Shapes.

    Returns:
        Log-likelihood of each row, float32 [B], and whether every target is the most probable token, bool [B].
    """
    hidden, _ = model.hidden_states({"tokens": tokens}, Context())
    chunk = bucket.chunk
    count = -(-tokens.shape[1] // chunk)

    def split_chunks(x: jax.Array) -> jax.Array:
        """Split [B, S, ...] into [chunks, B, C, ...]. Padding is not counted."""
        x = jnp.pad(x, [(0, 0), (0, count * chunk - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], count, chunk, *x.shape[2:]), 1, 0)

    def score_chunk(x: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden, targets, counted = x
        logits = model.logits(hidden).astype(jnp.float32)
        target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]
        values = jnp.where(counted, target_logits - jax.nn.logsumexp(logits, axis=-1), 0.0)
        return jnp.sum(values, axis=1), jnp.all((jnp.argmax(logits, axis=-1) == targets) | ~counted, axis=1)

    sums, greedy = lax.map(score_chunk, (split_chunks(hidden), split_chunks(targets), split_chunks(counted)))
    return jnp.sum(sums, axis=0), jnp.all(greedy, axis=0)


def language_model_functions(model: Any) -> Mapping[str, Function]:
    """Return the functions of a `CausalLM` with abstract arrays, by name."""

    def score_inputs(bucket: ScoreBucket) -> tuple[Any, ...]:
        shape = bucket.rows, bucket.length
        return Array(shape, jnp.int32), Array(shape, jnp.int32), Array(shape, jnp.bool)

    return {
        "score": Function(
            call=score,
            inputs=score_inputs,
            takes_bucket=True,
            get_bucket=lambda batch: ScoreBucket(*batch["tokens"].shape, chunk=min(128, batch["tokens"].shape[1])),
            describe="compute log-likelihoods of given tokens",
        ),
        **GenerationFunctions(model).declare(),
    }


def _flat(state: Any) -> Arrays:
    return {_path(k): v.get_value() for k, v in nnx.to_flat_state(state)}


def _path(key: tuple[Any, ...]) -> str:
    return ".".join(map(str, key))


def _axes(variable: Any, rank: int) -> tuple[str | None, ...]:
    # A separate layer contains slices of stacked arrays, but keeps the full axis names. Its own axes are the last ones.
    names = variable.get_metadata().get("out_sharding")
    return tuple(names)[len(names) - rank :] if names else ()
