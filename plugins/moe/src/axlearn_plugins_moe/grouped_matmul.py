"""The op `grouped_matmul`: consecutive groups of rows, each multiplied with a matrix of its own.

M rows, G groups, K inner and N outer dimension.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.contracts.kernels import OpRequest
from axlearn_core.kernels import selection

BLOCK = 128
"""Rows per product of the blocked implementation."""


def grouped_matmul(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, kernel: str | None = None) -> jax.Array:
    """Each group of rows times its matrix.

    Args:
        lhs: [M, K], the rows of group 0, then those of group 1, and so on.
        rhs: [G, K, N], in the dtype of `lhs`.
        sizes: int32 [G], how many rows each group has; they sum to M at most.
        kernel: the name of an implementation; None leaves the choice to the selection in force.

    Returns:
        [M, N] in the dtype of `lhs`. Rows behind the last group are not specified, nor are their gradients by `lhs`:
        the caller masks both.
    """
    return selection.chosen("grouped_matmul", {"lhs": lhs, "rhs": rhs}, {}, kernel)(lhs, rhs, sizes)


class _XLA:
    """`jax.lax.ragged_dot`; where a backend has no code for it, XLA computes every group for all rows."""

    def supports(self, request: OpRequest) -> str | None:
        """Everything."""
        return None

    def __call__(self, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        """See `grouped_matmul`."""
        return lax.ragged_dot(lhs, rhs, sizes)


class _XLABlocked:
    """A loop over blocks of rows of one group: the work is that of the rows, whatever the number of groups."""

    def supports(self, request: OpRequest) -> str | None:
        """Everything."""
        return None

    def __call__(self, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        """See `grouped_matmul`."""
        return _blocked(lhs, rhs, sizes, min(BLOCK, lhs.shape[0]))


XLA = _XLA()
XLA_BLOCKED = _XLABlocked()


class _Blocks(NamedTuple):
    """Each block is `block` rows from `start` on, of which the first `filled` are its group's; in the order of the rows."""

    start: jax.Array  # int32 [blocks]
    filled: jax.Array  # int32 [blocks], 0 for those that are not needed
    group: jax.Array  # int32 [blocks]


def _blocks(sizes: jax.Array, rows: int, block: int) -> _Blocks:
    groups = sizes.shape[0]
    index = jnp.arange(min(rows, rows // block + groups), dtype=jnp.int32)
    needed = -(-sizes // block)
    last = jnp.cumsum(needed)
    group = jnp.minimum(jnp.searchsorted(last, index, side="right").astype(jnp.int32), groups - 1)
    before = (index - (last - needed)[group]) * block
    start = (jnp.cumsum(sizes) - sizes)[group] + before
    count = jnp.clip(sizes[group] - before, 0, block)
    return _Blocks(jnp.minimum(start, rows), jnp.where(index < last[-1], count, 0), group)


def _products(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, block: int, contract: int) -> jax.Array:
    """[M, K] and [G, ...] -> [M, N]; `contract` is the dimension of a group's matrix that is summed over."""
    rows, out = lhs.shape[0], rhs.shape[2 if contract == 0 else 1]
    padded = jnp.pad(lhs, ((0, block), (0, 0)))

    def step(made: jax.Array, at: _Blocks) -> tuple[jax.Array, None]:
        def product() -> jax.Array:
            x = lax.dynamic_slice_in_dim(padded, at.start, block)
            matrix = lax.dynamic_index_in_dim(rhs, at.group, keepdims=False)
            return lax.dot_general(x, matrix, (((1,), (contract,)), ((), ())))

        # Rows behind those are the next block's, which overwrites them.
        new = lax.cond(at.filled > 0, product, lambda: lax.dynamic_slice_in_dim(made, at.start, block))
        return lax.dynamic_update_slice_in_dim(made, new, at.start, 0), None

    made = jnp.zeros((rows + block, out), lhs.dtype)
    return lax.scan(step, made, _blocks(sizes, rows, block))[0][:rows]


def _outer(lhs: jax.Array, grads: jax.Array, sizes: jax.Array, block: int) -> jax.Array:
    """[M, K], [M, N] -> float32 [G, K, N]: the gradient by the matrices."""
    lhs, grads = (jnp.pad(x, ((0, block), (0, 0))) for x in (lhs, grads))

    def step(total: jax.Array, at: _Blocks) -> tuple[jax.Array, None]:
        def product() -> jax.Array:
            x = lax.dynamic_slice_in_dim(lhs, at.start, block)
            mine = jnp.arange(block)[:, None] < at.filled
            g = jnp.where(mine, lax.dynamic_slice_in_dim(grads, at.start, block), 0)
            return lax.dot_general(x, g, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

        old = lax.dynamic_index_in_dim(total, at.group, keepdims=False)
        new = old + lax.cond(at.filled > 0, product, lambda: jnp.zeros_like(old))
        return lax.dynamic_update_index_in_dim(total, new, at.group, 0), None

    zeros = jnp.zeros((sizes.shape[0], lhs.shape[1], grads.shape[1]), jnp.float32)
    return lax.scan(step, zeros, _blocks(sizes, lhs.shape[0] - block, block))[0]


# Its own derivative, because that of a loop would add a whole array of zeros per block to the gradient of `rhs`.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _blocked(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, block: int) -> jax.Array:
    return _products(lhs, rhs, sizes, block, 0)


def _blocked_forward(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, block: int) -> tuple[jax.Array, Any]:
    return _blocked(lhs, rhs, sizes, block), (lhs, rhs, sizes)


def _blocked_backward(block: int, kept: Any, grads: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    lhs, rhs, sizes = kept
    by_rhs = _outer(lhs, grads, sizes, block).astype(rhs.dtype)
    return _products(grads, rhs, sizes, block, 1), by_rhs, None


_blocked.defvjp(_blocked_forward, _blocked_backward)
