"""Hook implementations of the plugin. Does not import JAX."""

from collections.abc import Sequence
from pathlib import Path

from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.contracts.mesh import MeshRule
from axlearn_core.contracts.remat import RematPolicy
from axlearn_core.contracts.target import Target
from axlearn_core.plugins.hookspecs import hookimpl
from axlearn_plugins_gpu import compat
from axlearn_plugins_gpu.choices import PRIORITIES
from axlearn_plugins_gpu.gpus import TARGETS
from axlearn_plugins_gpu.rules import POLICIES, rules


@hookimpl
def axlearn_targets() -> list[Target]:
    """Return the A100, H100, H200 and B200 targets."""
    return list(TARGETS)


@hookimpl
def axlearn_mesh_rules() -> list[MeshRule]:
    """Return the mesh rules, by target and model size."""
    return rules()


@hookimpl
def axlearn_before_devices(platforms: Sequence[str] | None) -> None:
    """On a machine without a driver, keep JAX's CUDA plugin from searching for CUDA libraries and printing errors.

    Do nothing if the user requested platforms, because an error about CUDA is then either appropriate or impossible.
    """
    if platforms is None and not any(
        Path(p).exists() for p in ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")
    ):
        compat.skip_cuda_check()


_ATTENTION = "axlearn_plugins_transformer.kernels.attention:AttentionOp"
_PAGED_ATTENTION = "axlearn_plugins_transformer.kernels.paged_attention:PagedAttentionOp"
_RMS_NORM = "axlearn_plugins_transformer.kernels.rms_norm:RMSNormOp"
_GATED_LINEAR_UNIT = "axlearn_plugins_transformer.kernels.gated_linear_unit:GatedLinearUnitOp"
_GROUPED_MATMUL = "axlearn_plugins_moe.grouped_matmul:GroupedMatmulOp"

_KERNELS = (
    (_ATTENTION, "attention", "cudnn", "cudnn_attention:CUDNN"),
    (_ATTENTION, "attention", "tokamax-mosaic", "tokamax_attention:MOSAIC_ATTENTION"),
    (_ATTENTION, "attention", "tokamax-triton", "tokamax_attention:TRITON"),
    (_GROUPED_MATMUL, "grouped_matmul", "tokamax-mosaic", "grouped_matmul:MOSAIC"),
    (_GROUPED_MATMUL, "grouped_matmul", "tokamax-triton", "grouped_matmul:TRITON"),
    (_PAGED_ATTENTION, "paged_attention", "pallas-triton", "paged_attention:TRITON"),
    (_RMS_NORM, "rms_norm", "tokamax-triton", "rms_norm:TRITON"),
    (_GATED_LINEAR_UNIT, "gated_linear_unit", "tokamax-triton", "gated_linear_unit:TRITON"),
    (_GATED_LINEAR_UNIT, "gated_linear_unit", "tokamax-mosaic", "gated_linear_unit:MOSAIC"),
)
"""(op class, op name, kernel name, module and name relative to `axlearn_plugins_gpu.kernels`)."""

_INTERPRETER = "axlearn_plugins_gpu.kernels.interpreter:interpret"
_HARDWARE_ONLY = {
    "cudnn": "is part of cuDNN, which runs only on NVIDIA GPUs",
    "tokamax-mosaic": "is a Mosaic GPU kernel, which runs only on NVIDIA GPUs",
}


@hookimpl
def axlearn_remat_policies() -> list[RematPolicy]:
    """Return the remat policies for GPUs."""
    return list(POLICIES)


@hookimpl
def axlearn_kernels() -> list[KernelImplementation]:
    """Return the adapters to cuDNN, tokamax and Pallas kernels."""
    return [
        KernelImplementation(
            name=name,
            op=op,
            priority=PRIORITIES[op_name, name].value,
            platforms=("gpu",),
            load=f"axlearn_plugins_gpu.kernels.{place}",
            tags=("context",) if op == _ATTENTION else (),
            interpreter=_INTERPRETER if name.endswith("triton") else None,
            hardware_only=_HARDWARE_ONLY.get(name, ""),
        )
        for op, op_name, name, place in _KERNELS
    ]
