"""The op `grouped_matmul`: consecutive groups of rows, each multiplied with a matrix of its own.

M rows, G groups, K inner and N outer dimension.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.kernels.op import Op, Shape

BLOCK = 128
"""Rows per product of the blocked implementation."""


@attrs.frozen(eq=False)
class GroupedMatmulOp(Op[jax.Array]):
    """Each group of rows times its matrix.

    The result is [M, N] in the dtype of `lhs`. Rows behind the last group are not specified, nor are their gradients by
    `lhs`: the caller masks both.

    Attributes:
        lhs: [M, K], the rows of group 0, then those of group 1, and so on.
        rhs: [G, K, N], in the dtype of `lhs`.
        sizes: int32 [G], how many rows each group has; they sum to M at most.
    """

    name = "grouped_matmul"

    lhs: jax.Array
    rhs: jax.Array
    sizes: jax.Array

    def operands(self) -> Mapping[str, Any]:
        """Rows and matrices."""
        return {"lhs": self.lhs, "rhs": self.rhs}

    def flops(self) -> float:
        """Each row meets one matrix."""
        return 2.0 * math.prod(self.lhs.shape) * self.rhs.shape[2]

    def kernel_flops(self, operands: Sequence[Shape], results: Sequence[Shape], *, opaque: bool) -> float | None:
        """One product of all rows, forward and backward alike.

        The grid of a kernel has all groups for all rows, and only the data tell which of those it skips.
        """
        return self.flops()

    def reference(self) -> jax.Array:
        """`jax.lax.ragged_dot`; on a backend without code for it, XLA computes every group for all rows."""
        return lax.ragged_dot(self.lhs, self.rhs, self.sizes)


class _XLABlocked:
    """A loop over blocks of rows of one group: the work is that of the rows, regardless of the number of groups."""

    def supports(self, op: GroupedMatmulOp, context: KernelContext) -> str | None:
        """Everything."""
        return None

    def __call__(self, op: GroupedMatmulOp) -> jax.Array:
        """[M, N]."""
        return _blocked_matmul(op.lhs, op.rhs, op.sizes, min(BLOCK, op.lhs.shape[0]))


XLA_BLOCKED = _XLABlocked()


class _Blocks(NamedTuple):
    """Each block is `block` rows from `start` on; the first `filled` belong to its group. In the order of the rows."""

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

    def step(products: jax.Array, at: _Blocks) -> tuple[jax.Array, None]:
        def product() -> jax.Array:
            x = lax.dynamic_slice_in_dim(padded, at.start, block)
            matrix = lax.dynamic_index_in_dim(rhs, at.group, keepdims=False)
            return lax.dot_general(x, matrix, (((1,), (contract,)), ((), ())))

        # Rows behind those are the next block's, which overwrites them.
        new = lax.cond(at.filled > 0, product, lambda: lax.dynamic_slice_in_dim(products, at.start, block))
        return lax.dynamic_update_slice_in_dim(products, new, at.start, 0), None

    zeros = jnp.zeros((rows + block, out), lhs.dtype)
    return lax.scan(step, zeros, _blocks(sizes, rows, block))[0][:rows]


def _outer(lhs: jax.Array, grads: jax.Array, sizes: jax.Array, block: int) -> jax.Array:
    """[M, K], [M, N] -> float32 [G, K, N]: the gradient by the matrices."""
    lhs, grads = (jnp.pad(x, ((0, block), (0, 0))) for x in (lhs, grads))

    def step(total: jax.Array, at: _Blocks) -> tuple[jax.Array, None]:
        def product() -> jax.Array:
            x = lax.dynamic_slice_in_dim(lhs, at.start, block)
            valid = jnp.arange(block)[:, None] < at.filled
            g = jnp.where(valid, lax.dynamic_slice_in_dim(grads, at.start, block), 0)
            return lax.dot_general(x, g, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

        old = lax.dynamic_index_in_dim(total, at.group, keepdims=False)
        new = old + lax.cond(at.filled > 0, product, lambda: jnp.zeros_like(old))
        return lax.dynamic_update_index_in_dim(total, new, at.group, 0), None

    zeros = jnp.zeros((sizes.shape[0], lhs.shape[1], grads.shape[1]), jnp.float32)
    return lax.scan(step, zeros, _blocks(sizes, lhs.shape[0] - block, block))[0]


# Its own derivative, because that of a loop would add a whole array of zeros per block to the gradient of `rhs`.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _blocked_matmul(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, block: int) -> jax.Array:
    return _products(lhs, rhs, sizes, block, 0)


def _blocked_forward(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, block: int) -> tuple[jax.Array, Any]:
    return _blocked_matmul(lhs, rhs, sizes, block), (lhs, rhs, sizes)


def _blocked_backward(block: int, residuals: Any, grads: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    lhs, rhs, sizes = residuals
    by_rhs = _outer(lhs, grads, sizes, block).astype(rhs.dtype)
    return _products(grads, rhs, sizes, block, 1), by_rhs, None


_blocked_matmul.defvjp(_blocked_forward, _blocked_backward)
