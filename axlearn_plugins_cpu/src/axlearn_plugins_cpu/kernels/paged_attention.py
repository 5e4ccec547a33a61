"""The op `paged_attention` in C++ (`native/`), for requests that are served on CPUs.

It copies no pages: a query meets the keys where they lie, and fetches the next page while it works on one. XLA for CPU gathers
pages into an array before it multiplies them.
"""

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.contracts.kernels import KernelContext
from axlearn_plugins_cpu.kernels import library
from axlearn_plugins_transformer.kernels.paged_attention import PagedAttentionOp, divides_heads, on_each_device

TARGET = "axlearn_paged_attention"
"""What exported programs call it."""
QUERIES, PAGES = ("float32", "bfloat16"), ("float32", "bfloat16", "int8")


class _Native:
    """Every device attends with its own heads, on its share of the processors."""

    def supports(self, op: PagedAttentionOp, context: KernelContext) -> str | None:
        """Keys and values apart and head by head, without a bias, in float32, bfloat16 or int8."""
        if library.missing is not None:
            return library.missing
        if op.split is None:
            return "how many tokens each request has is not known when it is compiled"
        if not op.heads_first or op.value_size is not None:
            return "its pages are not stored as those of CPUs are: keys and then values, head by head"
        if op.bias is not None:
            return f"it takes no bias ({op.bias.describe()})"
        size, query, pages = op.query.shape[-1], str(op.query.dtype), str(op.pages.dtype)
        if size % 16:
            return f"the head size {size} is not a multiple of 16"
        if query not in QUERIES or pages not in PAGES or (op.scales is None) != (pages != "int8"):
            return f"queries of {query} with pages of {pages}: it takes {' and '.join(QUERIES)} with {', '.join(PAGES)}"
        return None if divides_heads(op) else "its heads cannot be divided among the devices"

    def __call__(self, op: PagedAttentionOp) -> jax.Array:
        """[T, N, H]."""
        return on_each_device(op, attend)


def attend(op: PagedAttentionOp, instructions: int = 0, *, invariant: bool = False) -> jax.Array:
    """[T, N, H] on one device.

    Args:
        op: what the device has of it; see `_Native.supports`.
        instructions: the set of instructions (`library.instructions`); 0 takes the processor's best where it runs.
        invariant: whether tokens of requests that have one are computed in the same order as chunks of tokens.
    """
    assert op.split is not None
    scales = jnp.zeros((0,), jnp.float32) if op.scales is None else op.scales
    split = {"singles": np.int64(op.split.singles), "chunk": np.int64(op.split.chunk), "invariant": invariant}
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(op.query.shape, op.query.dtype), vmap_method="sequential")
    return call(op.query, op.pages, scales, op.table, op.lengths, **split, **library.attributes(op, instructions))


NATIVE = _Native()
