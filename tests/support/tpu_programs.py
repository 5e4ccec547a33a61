"""Compile programs for abstract TPUs."""

import jax
import jax.numpy as jnp
import pytest

from axlearn_core.compose.devices import topology_devices
from axlearn_core.kernels import selection
from axlearn_core.plugins.targets import find_machine
from support.needs import require

GENERATIONS = ["tpu-v4-8", "tpu-v5e-4", "tpu-v5p-8", "tpu-v6e-4", "tpu-7x-4"]


def not_only(default, values):
    """Return the values, with all but the default one marked as slow."""
    return [v if v == default else pytest.param(v, marks=pytest.mark.slow) for v in values]


def compiled(generation, function, *operands, gradients=True):
    """Compile a program for one device, with gradients of all operands if it has any. Return it with the chosen kernels."""
    require("libtpu")
    machine = find_machine(generation)
    place = jax.sharding.SingleDeviceSharding(topology_devices(machine)[0])
    shapes = [jax.ShapeDtypeStruct(s, d, sharding=place) for s, d in operands]

    def loss(*operands):
        return jnp.sum(function(*operands).astype(jnp.float32) ** 2)

    floats = tuple(i for i, (_, d) in enumerate(operands) if d != "int32")
    program = jax.value_and_grad(loss, floats) if gradients else loss
    with selection.use(selection.Selection(platform="tpu", target=machine.target.name, gradients=gradients)) as choices:
        lowered = jax.jit(program).trace(*shapes).lower(lowering_platforms=("tpu",))
    return lowered.compile(), [c.name for c in choices.choices]
