"""The `paged_attention` op in C++ (`native/`), for serving on CPUs.

The kernel reads keys and values in place, without copying pages, and prefetches the next page while it processes one. XLA's CPU
kernels gather the pages into an array before the matmul.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.contracts.kernels import KernelContext
from axlearn_plugins_cpu.kernels import library
from axlearn_plugins_transformer.kernels.paged_attention import PagedAttentionOp, divides_heads, on_each_device

TARGET = "axlearn_paged_attention"
"""Name of the FFI target in exported programs."""
QUERIES, PAGES = ("float32", "bfloat16"), ("float32", "bfloat16", "int8")


class _Native:
    """Paged attention; each device handles its own heads, on its share of the processors."""

    def supports(self, op: PagedAttentionOp, context: KernelContext) -> str | None:
        """Support separate, heads-first keys and values in float32, bfloat16 or int8, without a bias."""
        if library.unavailable_reason is not None:
            return library.unavailable_reason
        if op.split is None:
            return "the number of tokens of each request is not known at compile time"
        if not op.heads_first or op.value_size is not None:
            return "its pages do not have the CPU layout: keys, then values, head by head"
        if op.bias is not None:
            return f"it does not support a bias ({op.bias.describe()})"
        size, query, pages = op.query.shape[-1], str(op.query.dtype), str(op.pages.dtype)
        if size % 16:
            return f"the head size {size} is not a multiple of 16"
        if query not in QUERIES or pages not in PAGES or (op.scales is None) != (pages != "int8"):
            return f"it needs {' or '.join(QUERIES)} queries with {', '.join(PAGES)} pages, got {query} with {pages}"
        return None if divides_heads(op) else "the heads cannot be split evenly over the devices"

    def __call__(self, op: PagedAttentionOp) -> Any:
        """Return the attention output, [T, N, H], and with `log_sum_exp` also float32 [T, N]."""
        result = on_each_device(op, attend)
        return (result[..., :-1].astype(op.query.dtype), result[..., -1]) if op.log_sum_exp else result


def attend(op: PagedAttentionOp, instructions: int = 0, *, invariant: bool = False) -> jax.Array:
    """Return the attention output of one device, [T, N, H], or float32 [T, N, H + 1] with the log-sum-exp at the end.

    Args:
        op: The device's part of the op; see `_Native.supports`.
        instructions: Instruction set (see `library.instructions`); 0 selects the processor's best one at run time.
        invariant: Whether requests with a single token use the same summation order as chunks of tokens.
    """
    assert op.split is not None
    scales = jnp.zeros((0,), jnp.float32) if op.scales is None else op.scales
    split = {"singles": np.int64(op.split.singles), "chunk": np.int64(op.split.chunk), "invariant": invariant}
    shapes = (
        jax.ShapeDtypeStruct(op.query.shape, op.query.dtype),
        jax.ShapeDtypeStruct(op.query.shape[:2] if op.log_sum_exp else (0,), jnp.float32),
    )
    operands = op.query, op.pages, scales, op.table, op.lengths, library.sinks(op)
    call = jax.ffi.ffi_call(TARGET, shapes, vmap_method="sequential")
    result, log_sums = call(*operands, **split, **library.attributes(op, instructions))
    if not op.log_sum_exp:
        return result
    return jnp.concatenate([result.astype(jnp.float32), log_sums[..., None]], axis=-1)


NATIVE = _Native()
