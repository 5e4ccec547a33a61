"""The kernels of this plugin. Imports no JAX."""

from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.plugins.hookspecs import hookimpl

_MODULE = "axlearn_plugins_transformer.kernels.attention"
_PAGED = "axlearn_plugins_transformer.kernels.paged_attention"
_ROW_BY_ROW = {"cpu": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}}
"""YNNPACK computes products only. By default XLA for CPU also gives it all other work on 4,096 numbers or more, and computes
smaller work itself, with other results. A norm's 1 / sqrt(mean) would then depend on the number of tokens in the batch."""


@hookimpl
def axlearn_kernels() -> list[KernelImplementation]:
    """Attention by blocks, for masks that hide blocks; attention over pages where each request's share is known."""
    blocked = KernelImplementation(
        name="xla-blocked", op=f"{_MODULE}:AttentionOp", load=f"{_MODULE}:XLA_BLOCKED", priority=10
    )
    paged = KernelImplementation(
        name="xla-split",
        op=f"{_PAGED}:PagedAttentionOp",
        load="axlearn_plugins_transformer.kernels.paged_split:XLA_SPLIT",
        priority=10,
    )
    # Slower than the others: only where a config names them.
    invariant = [
        KernelImplementation(
            name="invariant",
            op=op,
            load=f"axlearn_plugins_transformer.kernels.invariant:{attribute}",
            priority=-1,
            compiler_options=_ROW_BY_ROW,
        )
        for op, attribute in (
            (f"{_MODULE}:AttentionOp", "INVARIANT"),
            (f"{_PAGED}:PagedAttentionOp", "INVARIANT_PAGED"),
        )
    ]
    return [blocked, paged, *invariant]
