"""Programs for GPUs that are not here."""

import functools

import attrs
import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from axlearn_core.compose.devices import absent
from axlearn_core.contracts.mesh import DEFAULT_RULES, MESH_AXES
from axlearn_core.kernels import selection
from axlearn_core.nn import sharding
from axlearn_core.plugins.targets import find_machine
from axlearn_core.testing import KernelSuite


@functools.cache
def mesh_of(name, **shape):
    """A mesh of a machine: `shape` by axis, all others 1."""
    grid = np.asarray(absent(find_machine(name))).reshape([shape.get(a, 1) for a in MESH_AXES])
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def compiled(function, machine, *shapes, gradients=False, tensor=1, options=None):
    """(the optimised program's text, the kernels that it chose) of a function of arrays, for one absent machine.

    `shapes` are (shape, dtype) pairs or (shape, dtype, mesh axes). With `gradients` the program is the gradient of the sum.
    """
    target = find_machine(machine).target
    mesh = mesh_of(machine, fsdp=find_machine(machine).devices // tensor, tensor=tensor)
    chosen = selection.Selection(platform="gpu", target=target.name, gradients=gradients)
    specs = [jax.ShapeDtypeStruct(s[0], s[1], sharding=NamedSharding(mesh, PartitionSpec(*s[2:]))) for s in shapes]

    def run(*args):
        with sharding.logical_rules(mesh, DEFAULT_RULES), selection.use(chosen):
            if not gradients:
                return function(*args)
            floats = tuple(i for i, s in enumerate(shapes) if np.dtype(s[1]).kind not in "iub")
            return jax.grad(lambda *xs: function(*xs).astype("float32").sum(), argnums=floats)(*args)

    lowered = jax.jit(run).trace(*specs).lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options=options or {}).as_text(), [c.name for c in chosen.choices]


@pytest.mark.usefixtures("interpreted")
class Interpreted(KernelSuite):
    """What each kernel of an op keeps, here."""

    name = "tokamax-triton"

    def declared(self, name):
        return attrs.evolve(super().declared(name), platforms=())

    def _only(self, *implementations):
        return selection.use(
            selection.Selection(target="h100", declared=lambda op: implementations if op == self.op else ())
        )
