"""Random streams: the numbers that a model draws in a step, derived from one key and never stored.

A module that draws holds an `nnx.RngStream` (`nnx.Dropout(rate, rngs=rngs)` does). Its key in a step is

    fold_in(fold_in(fold_in(root, step), path of the stream), index of the layer)

with the path as CRC-32 of its dotted name. A stack keeps one stream for all its layers, whose keys are told apart by the
index alone. So scanned and unrolled stacks draw the same numbers, as do resumed, resharded and rematerialised steps.
"""

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax


def is_stream(variable: object) -> bool:
    """Whether a variable belongs to a random stream: its key, or its count of what was drawn."""
    return isinstance(variable, nnx.RngState)


def is_key(value: Any) -> bool:
    """Whether an array holds typed random keys."""
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def derive(spec: Any, path: str, key: jax.Array | None) -> jax.Array:
    """The value that a stream's variable begins a step with.

    Args:
        spec: its shape and dtype; the leading axes of a stacked stream count layers.
        path: its dotted path in the model.
        key: of the step; None where nothing is drawn.
    """
    if not is_key(spec):
        return jnp.zeros(spec.shape, spec.dtype)
    base = jax.random.key(0) if key is None else jax.random.fold_in(key, zlib.crc32(path.encode()))
    return _fold_indices(base, spec.shape)


def _fold_indices(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if not shape:
        return key
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(math.prod(shape), dtype=jnp.uint32))
    return keys.reshape(shape)


def fold_in(tree: object, index: object) -> Any:
    """`tree` with `index` folded into each random key in it, for instance the number of a microbatch."""

    def fold(leaf: jax.Array) -> jax.Array:
        if not is_key(leaf):
            return leaf
        folded = jax.vmap(jax.random.fold_in, in_axes=(0, None))(leaf.reshape(-1), jnp.uint32(index))
        return folded.reshape(leaf.shape)

    return jax.tree.map(fold, tree)


def split_leading(array: jax.Array, sizes: tuple[int, ...]) -> list[jax.Array]:
    """`array` cut along its first axis. `lax.split`, which takes no keys, has the cheaper gradient."""
    if not is_key(array):
        return list(lax.split(array, sizes, axis=0))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [array[start : start + size] for start, size in zip(starts, sizes, strict=True)]
