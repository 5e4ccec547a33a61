"""What the plugin says through hooks. Imports no JAX."""

import os
from pathlib import Path

from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.contracts.mesh import MeshRule
from axlearn_core.contracts.remat import RematPolicy
from axlearn_core.contracts.target import Target
from axlearn_core.plugins.hookspecs import hookimpl
from axlearn_plugins_gpu.rules import POLICIES, rules
from axlearn_plugins_gpu.targets import TARGETS


@hookimpl
def axlearn_targets() -> list[Target]:
    """A100, H100, H200 and B200."""
    return list(TARGETS)


@hookimpl
def axlearn_mesh_rules() -> list[MeshRule]:
    """By the size of the model."""
    return rules()


if not any(Path(p).exists() for p in ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")):
    # No driver. Where XLA's GPU compiler is installed, JAX would look for CUDA's libraries and print that it misses them.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

_ATTENTION = "axlearn_plugins_transformer.kernels.attention:Attention"
_RMS_NORM = "axlearn_plugins_transformer.kernels.rms_norm:RMSNorm"
_GATED_LINEAR_UNIT = "axlearn_plugins_transformer.kernels.gated_linear_unit:GatedLinearUnit"
_GROUPED_MATMUL = "axlearn_plugins_moe.grouped_matmul:GroupedMatmul"

_KERNELS = (
    KernelImplementation(
        name="cudnn",
        op=_ATTENTION,
        priority=50,
        platforms=("gpu",),
        load="axlearn_plugins_gpu.kernels.cudnn_attention:CUDNN",
    ),
    KernelImplementation(
        name="tokamax-mosaic",
        op=_ATTENTION,
        priority=40,
        platforms=("gpu",),
        load="axlearn_plugins_gpu.kernels.tokamax_attention:MOSAIC_ATTENTION",
    ),
    KernelImplementation(
        name="tokamax-triton",
        op=_ATTENTION,
        priority=30,
        platforms=("gpu",),
        load="axlearn_plugins_gpu.kernels.tokamax_attention:TRITON",
    ),
    KernelImplementation(
        name="tokamax-mosaic",
        op=_GROUPED_MATMUL,
        priority=40,  # behind Triton's, whose numbers are known; tokamax has it before
        platforms=("gpu",),
        load="axlearn_plugins_gpu.kernels.grouped_matmul:MOSAIC",
    ),
    KernelImplementation(
        name="tokamax-triton",
        op=_GROUPED_MATMUL,
        priority=50,
        platforms=("gpu",),
        load="axlearn_plugins_gpu.kernels.grouped_matmul:TRITON",
    ),
    # Behind the reference, which XLA fuses: for configs that name them, until measurements on a GPU say more.
    KernelImplementation(
        name="tokamax-triton",
        op=_RMS_NORM,
        priority=-1,
        platforms=("gpu",),
        load="axlearn_plugins_gpu.kernels.rms_norm:TRITON",
    ),
    KernelImplementation(
        name="tokamax-triton",
        op=_GATED_LINEAR_UNIT,
        priority=-1,
        platforms=("gpu",),
        load="axlearn_plugins_gpu.kernels.gated_linear_unit:TRITON",
    ),
    KernelImplementation(
        name="tokamax-mosaic",
        op=_GATED_LINEAR_UNIT,
        priority=-2,
        platforms=("gpu",),
        load="axlearn_plugins_gpu.kernels.gated_linear_unit:MOSAIC",
    ),
)


@hookimpl
def axlearn_remat_policies() -> list[RematPolicy]:
    """What to keep on GPUs."""
    return list(POLICIES)


@hookimpl
def axlearn_kernels() -> list[KernelImplementation]:
    """Adapters to cuDNN and tokamax."""
    return list(_KERNELS)
