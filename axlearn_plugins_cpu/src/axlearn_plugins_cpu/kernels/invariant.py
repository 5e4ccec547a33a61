"""Attention whose rows do not depend on what is computed beside them, in C++ (`native/chunk.h`): of rows of a batch, and of pages.

Both run the same code for a query and its keys in their order, so their results are equal bit for bit. They take the same models.
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
from axlearn_plugins_transformer.kernels.per_device import parts_of, per_device

TARGET = "axlearn_attention"
"""What exported programs call it."""
QUERY, KEY = ("batch", None, "activation_heads", None), ("batch", None, "activation_kv", None)


def _refusal(op: AttentionOp | PagedAttentionOp) -> str | None:
    """Of a model's layers, the same for both ops."""
    if library.missing is not None:
        return library.missing
    size, value_size, dtypes, biased = traits(op)
    if biased:
        return "it takes no bias"
    if size % 16 or value_size != size:
        return f"keys of {size} and values of {value_size} numbers: it takes a multiple of 16, and as many of both"
    if set(dtypes) != {"float32"}:
        return f"queries, keys and values in {', '.join(dtypes)}: it takes float32"
    return None


class _Rows:
    """Every device attends with its own rows and heads."""

    def supports(self, op: InvariantAttentionOp, context: KernelContext) -> str | None:
        """float32, without a bias, heads of a multiple of 16 numbers."""
        if reason := _refusal(op):
            return reason
        divided = parts_of(op.query.shape, QUERY) == parts_of(op.key.shape, KEY)
        return None if divided else "its heads cannot be divided among the devices"

    def __call__(self, op: InvariantAttentionOp) -> jax.Array:
        """[B, Q, N, H]; the backward pass is that of XLA's kernel."""

        @jax.custom_vjp
        def run(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return per_device(lambda *own: attend_rows(op, *own), (QUERY, KEY, KEY), QUERY)(query, key, value)

        def forward(*operands: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            return run(*operands), operands

        def backward(operands: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, ...]:
            return jax.vjp(lambda *x: _with(op, *x).reference(), *operands)[1](gradient)

        run.defvjp(forward, backward)
        return run(op.query, op.key, op.value)


def _with(op: InvariantAttentionOp, query: jax.Array, key: jax.Array, value: jax.Array) -> InvariantAttentionOp:
    options = {"mask": op.mask, "scale": op.scale, "softcap": op.softcap}
    return InvariantAttentionOp(query, key, value, **options)


def attend_rows(
    op: InvariantAttentionOp, query: jax.Array, key: jax.Array, value: jax.Array, instructions: int = 0
) -> jax.Array:
    """[B, Q, N, H] on one device, of what it has of the operands; see `paged_attention.attend`."""
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(query.shape, jnp.float32), vmap_method="sequential")
    return call(query, key, value, **library.attributes(op, instructions))


class _Pages:
    """Every device attends with its own heads."""

    def supports(self, op: InvariantPagedAttentionOp, context: KernelContext) -> str | None:
        """As of rows. Pages of another order are put into that of CPUs, whose kernel has to take the rest."""
        if reason := _refusal(op):
            return reason
        return NATIVE.supports(op if op.heads_first else attrs.evolve(op, heads_first=True, pages=_spec(op)), context)

    def __call__(self, op: InvariantPagedAttentionOp) -> jax.Array:
        """[T, N, H]."""
        if not op.heads_first:
            op = attrs.evolve(op, heads_first=True, pages=_heads_first(op.pages))
        return on_each_device(op, lambda own: attend(own, invariant=True))


def _spec(op: InvariantPagedAttentionOp) -> Any:
    return jax.eval_shape(_heads_first, op.pages)


def _heads_first(pages: jax.Array) -> jax.Array:
    """[P, S, 2 G, H] -> [P, 2, G, S, H]."""
    pages = pages.reshape(*pages.shape[:2], -1, 2, pages.shape[-1])
    return jnp.transpose(pages, (0, 3, 2, 1, 4))


ROWS, PAGES = _Rows(), _Pages()
