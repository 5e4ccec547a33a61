"""Weights on the devices of one process. Groups of this process's virtual devices act as the processes of a job."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from axlearn_core.compose import ModelWeights, Part, compose
from axlearn_core.compose.process_weights import ProcessWeights, local_mesh, split_mesh
from axlearn_core.errors import ConfigError
from axlearn_core.plugins.resolve import resolve

AUTO = AxisType.Auto


def owner(size):
    """Devices are of processes with `size` devices each."""
    return lambda device: device.id // size


def mesh(**sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AUTO,) * len(sizes))


@pytest.mark.parametrize(
    ("sizes", "devices", "across", "within"),
    [
        ({"data": 2, "fsdp": 4}, 4, (2, 1), (1, 4)),
        ({"data": 2, "fsdp": 4}, 2, (2, 2), (1, 2)),
        ({"data": 4, "tensor": 2}, 4, (2, 1), (2, 2)),
        ({"fsdp": 8}, 1, (8,), (1,)),
        ({"fsdp": 8}, 8, (1,), (8,)),
    ],
)
def test_axes_are_split_into_parts_across_and_within_processes(sizes, devices, across, within):
    blocks = split_mesh(mesh(**sizes), owner(devices))
    assert blocks.devices.shape[::2] == across
    assert blocks.devices.shape[1::2] == within
    assert [*blocks.devices.flat] == jax.devices()
    for index in range(8 // devices):
        local = local_mesh(blocks, owner(devices), index)
        assert local.devices.shape == within
        assert local.axis_names == tuple(sizes)
        assert [d.id for d in local.devices.flat] == [*range(index * devices, (index + 1) * devices)]


def test_devices_that_are_not_a_block_are_an_error():
    alternating = lambda device: device.id // 2 % 2  # noqa: E731
    with pytest.raises(
        ConfigError, match=r"not a block of the mesh(?s:.*)over 2 processes(?s:.*)fix: remove mesh.shape"
    ):
        split_mesh(mesh(fsdp=8), alternating)


def weights_of(program):
    """Weights of a program, with a different value in each entry."""
    specs = program.weights_spec

    def fill(spec):
        values = np.arange(spec.size, dtype=np.float32).reshape(spec.shape).astype(spec.dtype)
        return jax.device_put(values, spec.sharding)

    return ModelWeights(jax.tree.map(fill, specs.params), jax.tree.map(fill, specs.variables))


def program_on(**shape):
    settings = {"model.decoder.hidden_dim": 32, "model.vocab_size": 64, "mesh.shape": shape}
    return compose(resolve("quickstart", target="none", set=settings).config)


def shards(array):
    return {shard.device: shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


@pytest.fixture(scope="module")
def sharded():
    """A program whose weights are sharded over two processes of four devices, and its weights."""
    program = program_on(fsdp=8)
    return program, weights_of(program)


@pytest.mark.parametrize("index", [0, 1])
def test_each_process_gets_all_weights_on_its_own_devices(sharded, index):
    program, weights = sharded
    local = ProcessWeights(program, owner=owner(4), index=index)
    fetched = local.fetch(weights)
    devices = set(jax.devices()[4 * index : 4 * index + 4])
    specs = local.program.parts[Part.WEIGHTS].params
    assert fetched.params.keys() == weights.params.keys()
    for path, array in fetched.params.items():
        np.testing.assert_array_equal(array, weights.params[path])
        assert array.sharding.device_set == devices
        assert array.sharding == specs[path].sharding  # so an engine on these devices does not copy it


def test_weights_that_a_process_has_already_are_not_copied(sharded):
    program = program_on(data=2, fsdp=4)
    weights = weights_of(program)
    local = ProcessWeights(program, owner=owner(4), index=1)
    fetched, copied = local.fetch(weights), local.fetch(weights, copy=True)
    for path, array in weights.params.items():
        assert shards(fetched.params[path]).items() <= shards(array).items()
        assert not shards(copied.params[path]).items() & shards(array).items()
        array.delete()  # as a training step does
        assert fetched.params[path].is_deleted()
        assert not copied.params[path].is_deleted()


def test_one_process_uses_the_training_program_and_its_weights(sharded):
    program, weights = sharded
    local = ProcessWeights(program)
    assert local.program is program
    assert local.fetch(weights) is weights
    copied = local.fetch(weights, copy=True)
    path = "decoder.norm.weight" if "decoder.norm.weight" in weights.params else next(iter(weights.params))
    assert not shards(copied.params[path]).items() & shards(weights.params[path]).items()
