"""Random streams: the random numbers of a step, derived from one key and never stored.

A module that draws random numbers has an `nnx.RngStream`, as `nnx.Dropout(rate, rngs=rngs)` does. The stream's key in a step is

    fold_in(fold_in(fold_in(root, step), path of the stream), index of the layer)

The path is hashed with CRC-32. A stack has one stream for all its layers, and only the index distinguishes their keys.
Scanned and unrolled stacks therefore draw the same numbers, as do resumed, resharded, and rematerialized steps.
"""

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax


def is_stream(variable: object) -> bool:
    """Return True for the key or the counter of a random stream."""
    return isinstance(variable, nnx.RngState)


def is_key(value: Any) -> bool:
    """Return True for an array of typed random keys."""
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def derive(spec: Any, path: str, key: jax.Array | None) -> jax.Array:
    """Return the initial value of a stream's variable in a step.

    Args:
        spec: Shape and dtype. The leading axes of a stacked stream index layers.
        path: Dotted path of the variable in the model.
        key: Key for the step, or None if no random numbers are drawn.
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
    """Fold an index, such as that of a microbatch, into each random key of a tree."""

    def fold(leaf: jax.Array) -> jax.Array:
        if not is_key(leaf):
            return leaf
        folded = jax.vmap(jax.random.fold_in, in_axes=(0, None))(leaf.reshape(-1), jnp.uint32(index))
        return folded.reshape(leaf.shape)

    return jax.tree.map(fold, tree)


def split_leading(array: jax.Array, sizes: tuple[int, ...]) -> list[jax.Array]:
    """Split an array along its first axis. Use `lax.split`, whose gradient is cheaper, except for random keys."""
    if not is_key(array):
        return list(lax.split(array, sizes, axis=0))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [array[start : start + size] for start, size in zip(starts, sizes, strict=True)]
