"""Batches on the devices: the same arrays by each way in which they get there."""

import jax
import numpy as np
import pytest

from axlearn_core.compose import compose
from axlearn_core.compose.program import SMALL_BATCH
from axlearn_core.plugins.resolve import resolve


@pytest.fixture(scope="module", params=[1, 4])
def program(request):
    return compose(resolve("quickstart", target="none").config, jax.devices()[: request.param])


def batch(rows):
    return {
        "tokens": np.arange(rows * 16, dtype=np.int64).reshape(rows, 16),
        "weights": np.linspace(0, 1, rows * 16).reshape(rows, 16),  # float64
        "sizes": np.arange(rows, dtype=np.int32),
    }


@pytest.mark.parametrize("rows", [4, SMALL_BATCH // 64])
@pytest.mark.parametrize("placed", [False, True])
def test_a_batch_has_the_same_values_at_every_size_and_number_of_devices(program, rows, placed):
    host = batch(rows)
    actual = program.put({k: jax.numpy.asarray(v) for k, v in host.items()} if placed else host)
    assert {k: str(v.dtype) for k, v in actual.items()} == {"tokens": "int32", "weights": "float32", "sizes": "int32"}
    for name, value in actual.items():
        np.testing.assert_array_equal(value, host[name].astype(value.dtype))
        assert value.committed
        assert value.sharding.mesh == program.layout.mesh
        assert len(value.addressable_shards) == program.layout.mesh.size
        assert value.addressable_shards[0].data.shape[0] == len(host[name]) // program.layout.mesh.size


def test_put_copies_arrays_that_the_input_overwrites_later():
    program = compose(resolve("quickstart", target="none").config, jax.devices()[:1])
    host = batch(4)
    actual = jax.block_until_ready(program.put(host))
    for value in host.values():
        value[:] = 0
    for name, value in actual.items():
        np.testing.assert_array_equal(value, batch(4)[name].astype(value.dtype))


def test_an_array_of_another_device_is_moved_after_batches_of_numpy():
    program = compose(resolve("quickstart", target="none").config, jax.devices()[:1])
    program.put(batch(4))
    actual = program.put({k: jax.device_put(v, jax.devices()[1]) for k, v in batch(4).items()})
    for name, value in actual.items():
        assert value.devices() == {jax.devices()[0]}
        np.testing.assert_array_equal(value, batch(4)[name].astype(value.dtype))


def test_batches_of_other_shapes_and_names_follow_one_another(program):
    for rows, names in ((4, "tokens"), (8, "tokens"), (4, "tokens weights"), (4, "tokens")):
        host = {k: v for k, v in batch(rows).items() if k in names.split()}
        assert {k: v.shape for k, v in program.put(host).items()} == {k: v.shape for k, v in host.items()}
