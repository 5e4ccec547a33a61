"""tokamax's kernels in Mosaic GPU, compiled for the target: a Hopper or a Blackwell, also one that is not here.

Two libraries ask the local machine for facts about the target. tokamax asks its first device which kernel to take. JAX's lowering
of a Mosaic kernel asks the mesh in force for the compute capability (`_infer_arch` in `jax.experimental.mosaic.gpu`); a mesh knows
only the kind of its device, and JAX then assumes a Hopper. So `lowering` replaces that function while a program for one of the
plugin's GPUs is lowered: it looks up the device kind, and asks JAX's own function about other GPUs. Where no mesh is in force, the
kernel is traced under one that names the target.

XLA compiles what was lowered for the GPU of the program, but the assembler behind it stays, for as long as the process lives, with
the architecture of its first Mosaic kernel, and fails for any other. The kernels are refused there; and where a program was traced
for another before the first was lowered, its lowering is.
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
"""The architecture of this process's first Mosaic kernel, once there is one."""


def refusal(target: str) -> str | None:
    """Why Mosaic's kernels cannot be compiled for a GPU that `CHIPS` knows; None where they can. Needs tokamax."""
    capability = CHIPS[target].capability
    if capability not in (HOPPER, BLACKWELL):
        return f"it is for Hopper and Blackwell, and {target} is neither"
    if capability != HOPPER and not compat.has_mosaic_architecture():
        return f"Mosaic GPU of JAX {jax.__version__} takes every GPU for a Hopper, and {target} is none"
    return _conflict(capability)


def _conflict(capability: tuple[int, int]) -> str | None:
    """Why this process cannot compile Mosaic's kernels for a compute capability; None where it can."""
    first = _first.get("kernel", capability)
    if first == capability:
        return None
    name = ".".join(map(str, first))
    return (
        f"this process has compiled Mosaic kernels for compute capability {name}, and can for no other: start another"
    )


def capability_of(kind: str) -> tuple[int, int] | None:
    """The compute capability of a device kind, as the driver reports it; None for GPUs that the plugin does not know."""
    return next((CHIPS[t.name].capability for t in TARGETS if kind in t.device_kinds), None)


def lowering(target: Target) -> contextlib.AbstractContextManager[None]:
    """Tells JAX's lowering of Mosaic kernels which GPU they are for. At its end, JAX has its own function back."""
    return compat.mosaic_architecture(_architecture)


def _architecture(original: Any) -> tuple[int, int]:
    device: Any = jax.sharding.get_abstract_mesh().abstract_device
    capability = None if device is None else capability_of(device.device_kind)
    architecture = original() if capability is None else capability
    if reason := _conflict(architecture):
        raise RequestError(reason)
    _first.setdefault("kernel", architecture)
    return architecture


@contextlib.contextmanager
def compiling_for(target: str) -> Iterator[None]:
    """Use while tracing its kernels for a GPU that `refusal` accepts."""
    capability = CHIPS[target].capability
    answers = {"is_sm90": capability == HOPPER, "is_sm100": capability == BLACKWELL}
    functions = {("gpu_utils", name): lambda *_, answer=answer: answer for name, answer in answers.items()}
    with tokamax.for_target(target), compat.tokamax_answers(functions):
        yield
