"""What the plugin says through hooks. Imports no JAX."""

import os
from pathlib import Path

from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.contracts.mesh import MeshRule
from axlearn_core.contracts.remat import RematPolicy
from axlearn_core.contracts.target import Target
from axlearn_core.plugins.hookspecs import hookimpl
from axlearn_plugins_gpu.choices import PRIORITIES
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

_KERNELS = (
    ("attention", "cudnn", "cudnn_attention:CUDNN"),
    ("attention", "tokamax-mosaic", "tokamax_attention:MOSAIC_ATTENTION"),
    ("attention", "tokamax-triton", "tokamax_attention:TRITON"),
    ("grouped_matmul", "tokamax-mosaic", "grouped_matmul:MOSAIC"),
    ("grouped_matmul", "tokamax-triton", "grouped_matmul:TRITON"),
    ("rms_norm", "tokamax-triton", "rms_norm:TRITON"),
    ("gated_linear_unit", "tokamax-triton", "gated_linear_unit:TRITON"),
    ("gated_linear_unit", "tokamax-mosaic", "gated_linear_unit:MOSAIC"),
)
"""Op, name, and where in `axlearn_plugins_gpu.kernels` it is."""


@hookimpl
def axlearn_remat_policies() -> list[RematPolicy]:
    """What to keep on GPUs."""
    return list(POLICIES)


@hookimpl
def axlearn_kernels(op: str) -> list[KernelImplementation]:
    """Adapters to cuDNN and tokamax."""
    return [
        KernelImplementation(
            name=name,
            op=op,
            priority=PRIORITIES[op, name].value,
            platforms=("gpu",),
            load=f"axlearn_plugins_gpu.kernels.{place}",
        )
        for kernel_op, name, place in _KERNELS
        if kernel_op == op
    ]
