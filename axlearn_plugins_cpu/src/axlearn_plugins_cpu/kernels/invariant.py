"""Batch-invariant attention in C++ (`native/chunk.h`), over rows of a batch and over pages.

Both kernels run the same code for a query and its keys, in the same order, so their results are bitwise equal. They support the
same models.
"""

from typing import Any

import attrs
import jax
import jax.numpy as jnp

from axlearn_core.contracts.kernels import KernelContext
from axlearn_plugins_cpu.kernels import library
from axlearn_plugins_cpu.kernels.paged_attention import NATIVE, attend
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.invariant import InvariantAttentionOp, InvariantPagedAttentionOp, traits
from axlearn_plugins_transformer.kernels.paged_attention import PagedAttentionOp, on_each_device
from axlearn_plugins_transformer.kernels.per_device import count_shards, per_device

TARGET = "axlearn_attention"
"""Name of the FFI target in exported programs."""
QUERY, KEY = ("batch", None, "activation_heads", None), ("batch", None, "activation_kv", None)
SINKS = ("activation_heads",)


def _refusal(op: AttentionOp | PagedAttentionOp) -> str | None:
    """Return why a model's layers are not supported, or None. The answer is the same for both ops."""
    if library.unavailable_reason is not None:
        return library.unavailable_reason
    size, value_size, dtypes, biased = traits(op)
    if biased:
        return "it does not support a bias"
    if size % 16 or value_size != size:
        return f"it needs keys and values of the same size, a multiple of 16, got {size} and {value_size}"
    if set(dtypes) != {"float32"}:
        return f"it needs float32 queries, keys and values, got {', '.join(dtypes)}"
    return None


class _Rows:
    """Attention over the rows of a batch. Each device computes its own rows and heads."""

    def supports(self, op: InvariantAttentionOp, context: KernelContext) -> str | None:
        """Support float32 without a bias, for head sizes that are multiples of 16."""
        if reason := _refusal(op):
            return reason
        divided = count_shards(op.query.shape, QUERY) == count_shards(op.key.shape, KEY)
        return None if divided else "the heads cannot be split evenly over the devices"

    def __call__(self, op: InvariantAttentionOp) -> jax.Array:
        """Return the attention output, [B, Q, N, H]. The backward pass uses XLA's kernel."""

        @jax.custom_vjp
        def run(query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array) -> jax.Array:
            axes = QUERY, KEY, KEY, SINKS if op.sinks is not None else (None,)
            return per_device(lambda *local: attend_rows(op, *local), axes, QUERY)(query, key, value, sinks)

        def forward(*operands: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            return run(*operands), operands

        def backward(operands: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, ...]:
            return jax.vjp(lambda *x: _replace_operands(op, *x).reference(), *operands)[1](gradient)

        run.defvjp(forward, backward)
        return run(op.query, op.key, op.value, library.sinks(op))


def _replace_operands(
    op: InvariantAttentionOp, query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array
) -> InvariantAttentionOp:
    return attrs.evolve(op, query=query, key=key, value=value, sinks=None if op.sinks is None else sinks)


def attend_rows(
    op: InvariantAttentionOp,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array,
    instructions: int = 0,
) -> jax.Array:
    """Return the attention output for one device's operands, [B, Q, N, H]; see `paged_attention.attend`."""
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(query.shape, jnp.float32), vmap_method="sequential")
    return call(query, key, value, sinks, **library.attributes(op, instructions))


class _Pages:
    """Attention over pages; each device handles its own heads."""

    def supports(self, op: InvariantPagedAttentionOp, context: KernelContext) -> str | None:
        """Support the same inputs as `_Rows`. Other page layouts are transposed to the CPU layout first."""
        if reason := _refusal(op):
            return reason
        return NATIVE.supports(op if op.heads_first else attrs.evolve(op, heads_first=True, pages=_spec(op)), context)

    def __call__(self, op: InvariantPagedAttentionOp) -> jax.Array:
        """Return the attention output, [T, N, H]."""
        if not op.heads_first:
            op = attrs.evolve(op, heads_first=True, pages=_heads_first(op.pages))
        return on_each_device(op, lambda local: attend(local, invariant=True))


def _spec(op: InvariantPagedAttentionOp) -> Any:
    return jax.eval_shape(_heads_first, op.pages)


def _heads_first(pages: jax.Array) -> jax.Array:
    """Transpose pages from [P, S, 2 G, H] to [P, 2, G, S, H]."""
    pages = pages.reshape(*pages.shape[:2], -1, 2, pages.shape[-1])
    return jnp.transpose(pages, (0, 3, 2, 1, 4))


ROWS, PAGES = _Rows(), _Pages()
