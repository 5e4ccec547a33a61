"""Kernels of the `grouped_matmul` op."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_plugins_moe.grouped_matmul import BLOCK, INVARIANT, XLA_BLOCKED, GroupedMatmulOp


def operation(sizes, inputs=32, outputs=16):
    rng = np.random.default_rng(0)
    lhs = rng.standard_normal((sum(sizes), inputs)).astype(np.float32)
    rhs = rng.standard_normal((len(sizes), inputs, outputs)).astype(np.float32)
    return GroupedMatmulOp(jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(sizes, jnp.int32))


@pytest.mark.parametrize("kernel", [XLA_BLOCKED, INVARIANT], ids=["blocked", "invariant"])
@pytest.mark.parametrize("sizes", [(3, 0, 5), (0, 0, 1), (BLOCK, 1, 2 * BLOCK + 3)], ids=str)
def test_kernels_compute_the_reference(kernel, sizes):
    op = operation(sizes)
    np.testing.assert_allclose(kernel(op), op.reference(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_invariant_rows_do_not_depend_on_the_rows_beside_them():
    """Each expert's rows alone, and among those of other experts."""
    sizes = (300, 1, 0, 130)
    op = operation(sizes, inputs=64, outputs=64)
    run = jax.jit(lambda lhs, sizes: INVARIANT(GroupedMatmulOp(lhs, op.rhs, sizes)))
    together = np.asarray(run(op.lhs, op.sizes))
    start = 0
    for group, count in enumerate(sizes):
        for rows in {min(count, 1), min(count, 7), count}:
            alone = run(op.lhs[start : start + rows], jnp.zeros(4, jnp.int32).at[group].set(rows))
            assert np.asarray(alone).tobytes() == together[start : start + rows].tobytes(), (group, rows)
        start += count
