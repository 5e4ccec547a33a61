"""Kernels of the `linear_attention` op. This module does not import JAX."""

from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.plugins.hookspecs import hookimpl

_MODULE = "axlearn_plugins_recurrent.kernels.linear_attention"


@hookimpl
def axlearn_kernels() -> list[KernelImplementation]:
    """Register the kernel that computes chunks of tokens with matrix products."""
    chunked = KernelImplementation(
        name="xla-chunked",
        op=f"{_MODULE}:LinearAttentionOp",
        load=f"{_MODULE}:XLA_CHUNKED",
        priority=10,
        extras=("documents", "state", "reload"),
    )
    return [chunked]
