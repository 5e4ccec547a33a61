"""Compile programs for abstract GPUs."""

import functools
import importlib
import json
import os
import re
import subprocess
import sys
from typing import NamedTuple

import attrs
import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from axlearn_core.compose.compiler import lowering
from axlearn_core.compose.devices import topology_devices
from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.contracts.mesh import DEFAULT_RULES, MESH_AXES
from axlearn_core.kernels import selection
from axlearn_core.nn import sharding
from axlearn_core.plugins.targets import find_machine
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.masks import Causal, Segments
from axlearn_testing import KernelSuite
from support.paths import TESTS


@functools.cache
def get_mesh(name, **shape):
    """Return a mesh of a machine: `shape` by axis, all others 1."""
    grid = np.asarray(topology_devices(find_machine(name))).reshape([shape.get(a, 1) for a in MESH_AXES])
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def compiled(function, machine, *shapes, gradients=False, tensor=1, options=None):
    """Compile a function of arrays for one abstract machine. Return (optimized program text, chosen kernels).

    `shapes` are (shape, dtype) pairs or (shape, dtype, mesh axes). With `gradients` the program is the gradient of the sum.
    """
    target = find_machine(machine).target
    mesh = get_mesh(machine, fsdp=find_machine(machine).devices // tensor, tensor=tensor)
    kernel_selection = selection.Selection(platform="gpu", target=target.name, gradients=gradients)
    specs = [jax.ShapeDtypeStruct(s[0], s[1], sharding=NamedSharding(mesh, PartitionSpec(*s[2:]))) for s in shapes]

    def run(*args):
        with sharding.logical_rules(mesh, DEFAULT_RULES), selection.use(kernel_selection):
            if not gradients:
                return function(*args)
            floats = tuple(i for i, s in enumerate(shapes) if np.dtype(s[1]).kind not in "iub")
            return jax.grad(lambda *xs: function(*xs).astype("float32").sum(), argnums=floats)(*args)

    traced = jax.jit(run).trace(*specs)
    with lowering(find_machine(machine).target):
        lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options=options or {}).as_text(), [c.name for c in kernel_selection.choices]


def kernel_calls(text):
    """Return the numbers of (Mosaic, Triton) kernel calls in a compiled program."""
    return tuple(text.count(f'custom_call_target="{call}"') for call in ("mosaic_gpu_v2", "__gpu$xla.gpu.triton"))


class Program(NamedTuple):
    """A function of a module with its options, to compile like `compiled` does."""

    function: str
    options: dict
    shapes: list
    gradients: bool = False


class Found(NamedTuple):
    """Facts about a compiled program: numbers of Mosaic and Triton calls, chosen kernels, and the PTX of Mosaic kernels."""

    mosaic: int
    triton: int
    chosen: list
    ptx: str

    @property
    def architectures(self):
        return set(re.findall(r"^\.target (\w+)", self.ptx, re.MULTILINE))


def compiled_alone(machine, *programs):
    """Compile programs for a machine in a new process, because a process can have Mosaic kernels for only one architecture."""
    process = subprocess.run(
        [sys.executable, "-c", "from support.gpu_programs import main; main()"],
        input=json.dumps([machine, programs]),
        capture_output=True,
        text=True,
        env=os.environ | {"MOSAIC_GPU_DUMP_PTX": "1", "PYTHONPATH": str(TESTS)},
    )
    assert process.returncode == 0, process.stderr[-4000:]
    *parts, rest = re.split(r"^FOUND (.*)\n", process.stdout, flags=re.MULTILINE)
    assert not rest.strip()
    return [Found(**json.loads(actual), ptx=ptx) for ptx, actual in zip(parts[::2], parts[1::2], strict=True)]


def main():
    machine, programs = json.load(sys.stdin)
    for name, options, shapes, gradients in programs:
        module, _, function = name.partition(":")
        run = functools.partial(getattr(importlib.import_module(module), function), **options)
        shapes = [(tuple(shape), dtype, *axes) for shape, dtype, *axes in shapes]
        text, choices = compiled(run, machine, *shapes, gradients=gradients)
        mosaic, triton = kernel_calls(text)
        print("FOUND", json.dumps({"mosaic": mosaic, "triton": triton, "chosen": choices}), flush=True)


def arrays(dtype, *shapes):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def attention_call(
    query=(2, 256, 8, 128), value=None, dtype="bfloat16", target="h100", gradients=True, packed=False, **options
):
    """Return (op, context) with two groups of keys; values may have another head size."""
    key = (*query[:2], 2, query[3])
    (ids,) = arrays("int32", query[:2])
    mask = Causal() & Segments(ids, ids) if packed else Causal()
    operands = arrays(dtype, query, key, (*key[:3], value or query[3]))
    context = KernelContext(platform="gpu", target=target, gradients=gradients)
    return AttentionOp(*operands, mask=mask, scale=0.1, **options), context


@pytest.mark.usefixtures("interpreted")
class Interpreted(KernelSuite):
    """Conformance tests of each kernel, in the interpreter."""

    name = "tokamax-triton"
    target = "h100"

    def find_declaration(self, name):
        return attrs.evolve(super().find_declaration(name), platforms=())

    def _only(self, *implementations):
        return selection.use(
            selection.Selection(target=self.target, declared=lambda op: implementations if op is self.op else ())
        )
