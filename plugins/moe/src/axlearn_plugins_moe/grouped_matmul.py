"""The `grouped_matmul` op: multiply consecutive groups of rows, each by its own matrix.

M rows, G groups, K inner dimension, N outer dimension.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.kernels.op import Op, Shape

BLOCK = 128
"""Rows per matmul in the blocked implementation."""
INVARIANT_BLOCK = 64
"""Rows per matmul in the batch-invariant implementation. XLA for CPU multiplies fewer rows with a different algorithm. An expert
with a single row pays for all of them."""


@attrs.frozen(eq=False)
class GroupedMatmulOp(Op[jax.Array]):
    """Multiplies each group of rows by its matrix.

    The result is [M, N] in the dtype of `lhs`. Rows after the last group are unspecified, and so are their gradients
    with respect to `lhs`. The caller must mask both.

    Attributes:
        lhs: Rows of group 0, then rows of group 1, and so on: [M, K].
        rhs: Matrices [G, K, N], in the dtype of `lhs`.
        sizes: Rows per group, int32 [G], summing to at most M.
    """

    name = "grouped_matmul"

    lhs: jax.Array
    rhs: jax.Array
    sizes: jax.Array

    def operands(self) -> Mapping[str, Any]:
        """Return the rows and the matrices."""
        return {"lhs": self.lhs, "rhs": self.rhs}

    def flops(self) -> float:
        """Count one vector-matrix multiplication per row."""
        return 2.0 * math.prod(self.lhs.shape) * self.rhs.shape[2]

    def kernel_flops(self, operands: Sequence[Shape], results: Sequence[Shape], *, opaque: bool) -> float | None:
        """Count one matmul over all rows, for the forward and the backward pass alike.

        A kernel's grid covers every group for all rows. It skips some of these steps, depending on the data.
        """
        return self.flops()

    def sample(self, rng: np.random.Generator) -> Self:
        """Sample uneven groups that together cover all rows. If there are more than two groups, one is empty."""
        count = self.sizes.shape[0]
        shares = rng.dirichlet(np.ones(count - (count > 2)))
        sizes = np.zeros(count, int)
        sizes[count > 2 :] = rng.multinomial(self.lhs.shape[0], shares)
        return attrs.evolve(super().sample(rng), sizes=jnp.asarray(sizes, self.sizes.dtype))

    def reference(self) -> jax.Array:
        """Compute `jax.lax.ragged_dot`.

        On backends without native support, XLA computes every group for all rows.
        """
        return lax.ragged_dot(self.lhs, self.rhs, self.sizes)


class _XLABlocked:
    """Loops over blocks of rows.

    The cost depends on the number of rows, not on the number of groups.
    """

    def supports(self, op: GroupedMatmulOp, context: KernelContext) -> str | None:
        """Support every operation."""
        return None

    def __call__(self, op: GroupedMatmulOp) -> jax.Array:
        """Return the results, [M, N]."""
        return _blocked_matmul(op.lhs, op.rhs, op.sizes, min(BLOCK, op.lhs.shape[0]))


class _Invariant:
    """Loops over blocks of `INVARIANT_BLOCK` rows, even if the batch has fewer.

    Each row is then multiplied in a matmul of the same shape, so its result does not depend on the other rows.
    """

    def supports(self, op: GroupedMatmulOp, context: KernelContext) -> str | None:
        """Support every operation."""
        return None

    def __call__(self, op: GroupedMatmulOp) -> jax.Array:
        """Return the results, [M, N]."""
        return _blocked_matmul(op.lhs, op.rhs, op.sizes, INVARIANT_BLOCK)


XLA_BLOCKED, INVARIANT = _XLABlocked(), _Invariant()


class _Blocks(NamedTuple):
    """Blocks of rows in row order.

    A block is `block` rows starting at `start`; its first `filled` rows are in its group.
    """

    start: jax.Array  # int32 [blocks]
    filled: jax.Array  # int32 [blocks], 0 for unused blocks
    group: jax.Array  # int32 [blocks]


def _blocks(sizes: jax.Array, rows: int, block: int) -> _Blocks:
    groups = sizes.shape[0]
    index = jnp.arange(min(rows, rows // block + groups), dtype=jnp.int32)
    needed = -(-sizes // block)
    last = jnp.cumsum(needed)
    group = jnp.minimum(jnp.searchsorted(last, index, side="right").astype(jnp.int32), groups - 1)
    offset = (index - (last - needed)[group]) * block
    start = (jnp.cumsum(sizes) - sizes)[group] + offset
    count = jnp.clip(sizes[group] - offset, 0, block)
    return _Blocks(jnp.minimum(start, rows), jnp.where(index < last[-1], count, 0), group)


def _products(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, block: int, contract: int) -> jax.Array:
    """Multiply [M, K] by matrices [G, ...] to [M, N].

    `contract` is the matrix dimension to sum over.
    """
    rows, out = lhs.shape[0], rhs.shape[2 if contract == 0 else 1]
    padded = jnp.pad(lhs, ((0, block), (0, 0)))

    def step(products: jax.Array, blocks: _Blocks) -> tuple[jax.Array, None]:
        def product() -> jax.Array:
            x = lax.dynamic_slice_in_dim(padded, blocks.start, block)
            matrix = lax.dynamic_index_in_dim(rhs, blocks.group, keepdims=False)
            return lax.dot_general(x, matrix, (((1,), (contract,)), ((), ())))

        # This also writes rows of the next block, which overwrites them.
        new = lax.cond(blocks.filled > 0, product, lambda: lax.dynamic_slice_in_dim(products, blocks.start, block))
        return lax.dynamic_update_slice_in_dim(products, new, blocks.start, 0), None

    zeros = jnp.zeros((rows + block, out), lhs.dtype)
    return lax.scan(step, zeros, _blocks(sizes, rows, block))[0][:rows]


def _outer(lhs: jax.Array, grads: jax.Array, sizes: jax.Array, block: int) -> jax.Array:
    """Return the gradient with respect to the matrices: [M, K], [M, N] -> float32 [G, K, N]."""
    lhs, grads = (jnp.pad(x, ((0, block), (0, 0))) for x in (lhs, grads))

    def step(total: jax.Array, blocks: _Blocks) -> tuple[jax.Array, None]:
        def product() -> jax.Array:
            x = lax.dynamic_slice_in_dim(lhs, blocks.start, block)
            valid = jnp.arange(block)[:, None] < blocks.filled
            g = jnp.where(valid, lax.dynamic_slice_in_dim(grads, blocks.start, block), 0)
            return lax.dot_general(x, g, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

        old = lax.dynamic_index_in_dim(total, blocks.group, keepdims=False)
        new = old + lax.cond(blocks.filled > 0, product, lambda: jnp.zeros_like(old))
        return lax.dynamic_update_index_in_dim(total, new, blocks.group, 0), None

    zeros = jnp.zeros((sizes.shape[0], lhs.shape[1], grads.shape[1]), jnp.float32)
    return lax.scan(step, zeros, _blocks(sizes, lhs.shape[0] - block, block))[0]


# Use a custom derivative, because the loop's own derivative adds an array of zeros per block to the gradient of `rhs`.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _blocked_matmul(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, block: int) -> jax.Array:
    return _products(lhs, rhs, sizes, block, 0)


def _blocked_forward(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, block: int) -> tuple[jax.Array, Any]:
    return _blocked_matmul(lhs, rhs, sizes, block), (lhs, rhs, sizes)


def _blocked_backward(block: int, residuals: Any, grads: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    lhs, rhs, sizes = residuals
    rhs_grads = _outer(lhs, grads, sizes, block).astype(rhs.dtype)
    return _products(grads, rhs, sizes, block, 1), rhs_grads, None


_blocked_matmul.defvjp(_blocked_forward, _blocked_backward)
