"""Arrays in host memory: every piece is at its place in each shard, and JAX does not copy the memory."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axlearn_plugins_models.huggingface.host_arrays import MIN_ROWS, TILE, HostArray, copy_values, in_host_memory

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")


def sharding(*parts):
    return NamedSharding(Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("a", "b")), PartitionSpec(*parts))


@pytest.mark.parametrize("parts", [(), ("a",), (None, "b"), ("b", None, "a"), (None, ("a", "b"))])
def test_pieces_of_every_size_over_every_sharding(parts):
    values = np.random.default_rng(0).standard_normal((4, 8, 6)).astype(np.float32)
    array = HostArray(jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding(*parts)))
    for layer, begin in itertools.product(range(4), (0, 3, 5)):
        end = {0: 3, 3: 5, 5: 8}[begin]
        array.put(values[layer, begin:end], (layer, begin))
    result = array.finish()
    assert result.sharding == sharding(*parts)
    np.testing.assert_array_equal(np.asarray(result), values)


def test_values_are_converted_to_the_dtype_of_the_array():
    array = HostArray(jax.ShapeDtypeStruct((4,), "bfloat16", sharding=sharding("a")))
    array.put(np.asarray([1.5, 2.25, 3.0, 4.0], np.float32), ())
    assert array.finish().astype("float32").tolist() == [1.5, 2.25, 3.0, 4.0]


def test_cpus_of_this_process_have_it_in_host_memory():
    assert in_host_memory(sharding("a"))
    assert in_host_memory(jax.sharding.SingleDeviceSharding(jax.devices()[0]))


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16")])
@pytest.mark.parametrize("shape", [(3, MIN_ROWS, 17), (2, TILE[0] + 5, TILE[1] + 3), (MIN_ROWS - 1, 1, 5), (70, 65, 1)])
def test_transposed_values_are_copied_in_tiles(order, dtypes, shape):
    source = np.random.default_rng(0).integers(0, 256, shape).astype(dtypes[0]).transpose(order)
    target = np.zeros(source.shape, dtypes[1])
    copy_values(target, source)
    np.testing.assert_array_equal(target.astype("float32"), source.astype("float32"))
