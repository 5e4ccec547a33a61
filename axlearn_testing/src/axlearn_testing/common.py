"""What the suites share: comparisons of trees, compilation for tests, and what a machine has to have."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit`, on CPUs with little optimisation: most of the time of these tests would go into compiling."""
    quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(function, compiler_options=quick, **options)


def need_devices(count: int) -> None:
    """Skips the test on a machine with fewer devices, saying how to have as many."""
    if len(jax.devices()) < count:
        pytest.skip(
            f"needs {count} devices, and there are {len(jax.devices())}: set JAX_PLATFORMS=cpu and "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count} before JAX starts"
        )


def leaves_of(tree: object) -> dict[str, Any]:
    """Path -> leaf."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def is_float(leaf: Any) -> bool:
    """Whether a leaf has gradients."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def norm(*arrays: object) -> float:
    """The root of the sum of squares of everything, in float64."""
    return float(np.sqrt(sum(np.sum(np.square(np.asarray(a, np.float64))) for a in arrays)))


def assert_close(got: object, expected: object, tolerance: float, label: str) -> None:
    """Compares two trees leaf by leaf: floats by the norm of their difference, everything else exactly.

    The difference of a leaf may be `tolerance` times its norm, or a hundredth of that times the norm of the whole tree:
    a leaf that is close to nothing beside the others has no digits of its own.
    """
    one, two = leaves_of(got), leaves_of(expected)
    assert one.keys() == two.keys(), f"{label}: another structure"
    whole = norm(*(x for x in two.values() if is_float(x)))
    for path, x in two.items():
        assert one[path].shape == x.shape, f"{label}{path}: shape {one[path].shape}, expected {x.shape}"
        if is_float(x):
            a, b = (np.asarray(v, np.float64) for v in (one[path], x))
            off, most = norm(a - b), tolerance * max(norm(b), 0.01 * whole)
            assert off <= most, f"{label}{path}: differs by {off:.3g} of {norm(b):.3g}, more than {most:.3g}"
        else:
            np.testing.assert_array_equal(np.asarray(one[path]), np.asarray(x), err_msg=f"{label}{path}")


def assert_equal(got: object, expected: object, label: str) -> None:
    """Compares two trees of arrays bit by bit, with their dtypes."""
    one, two = leaves_of(got), leaves_of(expected)
    assert one.keys() == two.keys(), f"{label}: another structure"
    for path, x in two.items():
        assert one[path].dtype == x.dtype, f"{label}{path}: {one[path].dtype}, expected {x.dtype}"
        np.testing.assert_array_equal(_data(one[path]), _data(x), err_msg=f"{label}{path}")


def _data(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
