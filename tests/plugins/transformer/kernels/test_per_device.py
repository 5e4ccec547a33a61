"""Sharding of arrays over devices, and kernels on the shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.compose.layout import make_mesh
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.nn.sharding import logical_rules
from axlearn_plugins_transformer.kernels.per_device import count_shards, per_device, split_over

RULES = {"rows": ("data", "fsdp"), "heads": ("tensor",), "other": ("tensor", "data"), "alone": ("expert",)}


@pytest.fixture
def placed():
    with logical_rules(make_mesh(Mesh(shape={"data": 2, "fsdp": 2, "tensor": 2})), RULES):
        yield


@pytest.mark.parametrize(
    ("shape", "axes", "over", "parts"),
    [
        ((8, 5, 4), ("rows", None, "heads"), (("data", "fsdp"), (), ("tensor",)), (4, 1, 2)),
        ((8, 3), ("rows", "heads"), (("data", "fsdp"), ()), (4, 1)),  # 2 does not divide 3
        ((6, 4), ("rows", "heads"), ((), ("tensor",)), (1, 2)),  # 4 does not divide 6
        ((8, 4), ("rows", "other"), (("data", "fsdp"), ("tensor",)), (4, 2)),  # each mesh axis once
        ((8, 4), ("unknown", "alone"), ((), ()), (1, 1)),  # no rule, and a mesh axis of one device
        ((), (), (), ()),
    ],
)
def test_each_dimension_is_split_over_its_mesh_axes(placed, shape, axes, over, parts):
    assert split_over(shape, axes) == over
    assert count_shards(shape, axes) == parts


def test_without_a_placement_nothing_is_split():
    assert split_over((8, 4), ("rows", "heads")) == ((), ())
    assert count_shards((8, 4), ("rows", "heads")) == (1, 1)


def test_a_device_has_the_size_divided_by_the_parts(placed):
    sizes = []

    def kernel(x):
        sizes.append(x.shape)
        return x * 2

    x, axes = jnp.arange(96.0).reshape(8, 3, 4), ("rows", None, "heads")
    result = jax.jit(per_device(kernel, [axes], axes))(x)
    np.testing.assert_array_equal(result, x * 2)
    assert sizes == [tuple(n // k for n, k in zip(x.shape, count_shards(x.shape, axes), strict=True))] == [(2, 3, 2)]
