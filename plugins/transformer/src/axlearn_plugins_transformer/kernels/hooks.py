"""Kernels of this plugin. This module does not import JAX."""

from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.plugins.hookspecs import hookimpl

_MODULE = "axlearn_plugins_transformer.kernels.attention"
_PAGED = "axlearn_plugins_transformer.kernels.paged_attention"
DOTS_ONLY = {"cpu": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}}
"""Restricts YNNPACK to matrix multiplications. By default, XLA on CPUs also uses it for other operations on 4,096 elements or
more, with results that differ from those of smaller operations. A norm's 1 / sqrt(mean) would then depend on the batch size."""


@hookimpl
def axlearn_kernels() -> list[KernelImplementation]:
    """Register the kernels of this plugin.

    They are for masks that hide blocks, paged attention with a static split, and batch invariance.
    """
    blocked = KernelImplementation(
        name="xla-blocked",
        op=f"{_MODULE}:AttentionOp",
        load=f"{_MODULE}:XLA_BLOCKED",
        priority=10,
        extras=("sinks", "log_sum_exp"),
    )
    paged = KernelImplementation(
        name="xla-split",
        op=f"{_PAGED}:PagedAttentionOp",
        load="axlearn_plugins_transformer.kernels.paged_split:XLA_SPLIT",
        priority=10,
        extras=("sinks", "mask", "log_sum_exp"),
    )
    # These are slower, so they run only if a config names them.
    invariant = [
        KernelImplementation(
            name="invariant",
            op=op,
            load=f"axlearn_plugins_transformer.kernels.invariant:{attribute}",
            priority=-1,
            compiler_options=DOTS_ONLY,
            extras=("sinks", "mask"),
        )
        for op, attribute in (
            (f"{_MODULE}:AttentionOp", "INVARIANT"),
            (f"{_PAGED}:PagedAttentionOp", "INVARIANT_PAGED"),
        )
    ]
    return [blocked, paged, *invariant]
