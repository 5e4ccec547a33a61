"""Helpers for the suites: compare trees, compile for tests, and check the machine."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.plugins.backends import prepare_backends


def compile_fast(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return `jax.jit(function)`. On CPUs it compiles with few optimizations, because compilation dominates the test time."""
    prepare_backends()
    quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(function, compiler_options=quick, **options)


def need_devices(count: int) -> None:
    """Skip the test if the machine has too few devices, with a message about how to get more."""
    prepare_backends()
    if len(jax.devices()) < count:
        pytest.skip(
            f"needs {count} devices, got {len(jax.devices())}: set JAX_PLATFORMS=cpu and "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count} before JAX starts"
        )


def leaves_by_path(tree: object) -> dict[str, Any]:
    """Return the leaves of a tree by path."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def is_float(leaf: Any) -> bool:
    """Return whether a leaf has gradients."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def norm(*arrays: object) -> float:
    """Return the L2 norm over all arrays, in float64."""
    return float(np.sqrt(sum(np.sum(np.square(np.asarray(a, np.float64))) for a in arrays)))


def assert_close(got: object, expected: object, tolerance: float, label: str) -> None:
    """Assert that two trees are close: floats by the norm of their difference, other leaves exactly.

    A leaf may differ by up to `tolerance` times its norm, or by up to a hundredth of `tolerance` times the norm of the whole
    tree. The second limit is for leaves that are close to zero compared with other leaves.
    """
    got_leaves, expected_leaves = leaves_by_path(got), leaves_by_path(expected)
    assert got_leaves.keys() == expected_leaves.keys(), f"{label}: the structures differ"
    tree_norm = norm(*(x for x in expected_leaves.values() if is_float(x)))
    for path, x in expected_leaves.items():
        assert got_leaves[path].shape == x.shape, f"{label}{path}: shape {got_leaves[path].shape}, expected {x.shape}"
        if is_float(x):
            a, b = (np.asarray(v, np.float64) for v in (got_leaves[path], x))
            error, limit = norm(a - b), tolerance * max(norm(b), 0.01 * tree_norm)
            assert error <= limit, f"{label}{path}: differs by {error:.3g} of {norm(b):.3g}, more than {limit:.3g}"
        else:
            np.testing.assert_array_equal(np.asarray(got_leaves[path]), np.asarray(x), err_msg=f"{label}{path}")


def assert_equal(got: object, expected: object, label: str) -> None:
    """Assert that two trees of arrays are bitwise equal, with equal dtypes."""
    got_leaves, expected_leaves = leaves_by_path(got), leaves_by_path(expected)
    assert got_leaves.keys() == expected_leaves.keys(), f"{label}: the structures differ"
    for path, x in expected_leaves.items():
        assert got_leaves[path].dtype == x.dtype, f"{label}{path}: {got_leaves[path].dtype}, expected {x.dtype}"
        np.testing.assert_array_equal(_data(got_leaves[path]), _data(x), err_msg=f"{label}{path}")


def _data(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
