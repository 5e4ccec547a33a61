"""Compile tokamax's Mosaic GPU kernels for a Hopper or Blackwell target, which need not be the local GPU.

Two libraries query the local machine instead of the target. tokamax asks the first local device which kernel to use. JAX's
lowering of a Mosaic kernel asks the current mesh for the compute capability (`_infer_arch` in
`jax.experimental.mosaic.gpu`). A mesh knows only the kind of its devices, and JAX then assumes a Hopper. So `lowering`
replaces that function while a program for one of this plugin's GPUs is lowered. The replacement looks up the device kind,
and calls JAX's function for other GPUs. If no mesh is set, the kernel is traced under one that names the target.

XLA compiles a kernel for the program's GPU. But the assembler keeps the architecture of the first Mosaic kernel in the
process, and fails for any other architecture. `refusal` then rejects the kernels. If a program was traced for a different
architecture before the first kernel was lowered, lowering it raises an error.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from axlearn_core.contracts.target import Target
from axlearn_core.errors import RequestError
from axlearn_plugins_gpu import compat
from axlearn_plugins_gpu.chips import CHIPS
from axlearn_plugins_gpu.gpus import TARGETS
from axlearn_plugins_gpu.kernels import tokamax

HOPPER, BLACKWELL = (9, 0), (10, 0)

_first: dict[str, tuple[int, int]] = {}
"""Architecture of this process's first Mosaic kernel, if any."""


def refusal(target: str) -> str | None:
    """Return why Mosaic kernels cannot be compiled for a GPU in `CHIPS`, or None if they can. Requires tokamax."""
    capability = CHIPS[target].capability
    if capability not in (HOPPER, BLACKWELL):
        return f"it supports Hopper and Blackwell, and {target} is neither"
    if capability != HOPPER and not compat.has_mosaic_architecture():
        return f"Mosaic GPU in JAX {jax.__version__} compiles only for Hopper, and {target} is not a Hopper GPU"
    return _conflict(capability)


def _conflict(capability: tuple[int, int]) -> str | None:
    """Return why this process cannot compile Mosaic kernels for a compute capability, or None if it can."""
    first = _first.get("kernel", capability)
    if first == capability:
        return None
    name = ".".join(map(str, first))
    return (
        f"this process has compiled Mosaic kernels for compute capability {name} and cannot switch: start a new process"
    )


def compute_capability(kind: str) -> tuple[int, int] | None:
    """Return the compute capability of a device kind that the driver reports, or None for an unknown GPU."""
    return next((CHIPS[t.name].capability for t in TARGETS if kind in t.device_kinds), None)


def lowering(target: Target) -> contextlib.AbstractContextManager[None]:
    """Tell JAX's lowering of Mosaic kernels which GPU is the target. On exit, restore JAX's function."""
    return compat.patch_mosaic_architecture(_architecture)


def _architecture(original: Any) -> tuple[int, int]:
    device: Any = jax.sharding.get_abstract_mesh().abstract_device
    capability = None if device is None else compute_capability(device.device_kind)
    architecture = original() if capability is None else capability
    if reason := _conflict(architecture):
        raise RequestError(reason)
    _first.setdefault("kernel", architecture)
    return architecture


@contextlib.contextmanager
def use_mosaic_target(target: str) -> Iterator[None]:
    """Trace Mosaic kernels for a GPU that `refusal` accepts."""
    capability = CHIPS[target].capability
    answers = {"is_sm90": capability == HOPPER, "is_sm100": capability == BLACKWELL}
    functions = {("gpu_utils", name): lambda *_, answer=answer: answer for name, answer in answers.items()}
    with tokamax.use_target(target), compat.patch_tokamax(functions):
        yield
