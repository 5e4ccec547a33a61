"""Flash attention of the Neuron SDK (`neuronxcc.nki.kernels.attention`), forward and backward.

Layouts of its kernels, as the SDK documents them, with b rows, n heads, h head size, s positions:

    flash_fwd        q, k [b, n, h, s]; v [b, n, s, h]                  -> o [b, n, s, h], lse [b, n, 128, s / 128]
    flash_attn_bwd   q, k, v, o, dy [b, n, h, s]; lse                   -> dq, dk, dv [b, n, h, s]

A bias is [1, 1, s, s], for all rows and heads alike: masks that differ by row are done row by row. Where the SDK is not
installed the kernels cannot run; the rest of this module does, and is tested with kernels written in JAX.
"""

import functools
import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from axlearn_core.contracts.kernels import KernelContext
from axlearn_plugins_neuron.sdk import missing
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.masks import And, Causal, Full
from axlearn_plugins_transformer.kernels.per_device import per_device

TILES = (2048, 1024, 512)
"""Keys that the forward kernel takes at a time: the largest that divides their number."""

HEADS = ("batch", None, "activation_heads", None)
HIDDEN = -30_000.0
"""Added to hidden scores: beyond what exp can tell from zero, within what bfloat16 holds."""


class _Static(NamedTuple):
    """What of a call is known while tracing."""

    scale: float
    causal: bool
    tile: int


class _Flash:
    """See the module."""

    def supports(self, op: AttentionOp, context: KernelContext) -> str | None:
        """Self-attention with heads up to 128, lengths in tiles of 512; no soft cap, no bias on the scores."""
        if reason := missing(("jax-neuronx", "neuronx-cc")):
            return reason
        return unsupported(op)

    def __call__(self, op: AttentionOp) -> jax.Array:
        """[B, S, N, V]."""
        query, key, value = op.query, op.key, op.value
        length = key.shape[1]
        parts = op.mask.parts
        rest = tuple(p for p in parts if not isinstance(p, (Causal, Full)))
        hidden = None
        if rest:
            visible = And(rest).materialize((0, query.shape[1]), (0, length))
            hidden = jnp.where(visible, 0.0, HIDDEN).astype(query.dtype)
        causal = any(isinstance(p, Causal) for p in parts)
        static = _Static(op.scale, causal, next(t for t in TILES if length % t == 0))
        # The backward kernel takes as many key heads as query heads.
        repeats = query.shape[2] // key.shape[2]
        if repeats > 1:
            key, value = jnp.repeat(key, repeats, axis=2), jnp.repeat(value, repeats, axis=2)
        rows = None if hidden is None else ("batch" if hidden.shape[0] > 1 else None, None, None)
        run = functools.partial(_attend, static=static)
        return per_device(run, [HEADS, HEADS, HEADS, rows], HEADS)(query, key, value, hidden)


NKI_FLASH = _Flash()


def unsupported(op: AttentionOp) -> str | None:
    """Why the kernels cannot do a call, whether they are here or not."""
    query, key, value = (x.shape for x in (op.query, op.key, op.value))
    if len(set(op.dtypes.values())) > 1:
        return "queries, keys and values differ in dtype"
    if op.softcap is not None:
        return "it has no soft cap"
    if op.bias is not None:
        return "it takes no bias on the scores whose gradient is needed"
    if not op.aligned:
        return "queries and keys are not the same positions"
    if query[3] > 128 or query[3] != value[3]:
        return f"head sizes {query[3]} and {value[3]}: it takes one size of at most 128"
    if key[1] % TILES[-1]:
        return f"the length {key[1]} is not a multiple of {TILES[-1]}"
    return None


def _attend(
    query: jax.Array, key: jax.Array, value: jax.Array, hidden: jax.Array | None, *, static: _Static
) -> jax.Array:
    if hidden is None or hidden.shape[0] == 1:
        return _attention(query, key, value, hidden, static)

    def row(operands: tuple[jax.Array, ...]) -> jax.Array:
        query, key, value, hidden = (x[None] for x in operands)
        return jnp.squeeze(_attention(query, key, value, hidden, static), 0)

    return lax.map(row, (query, key, value, hidden))  # each with its own bias


def _kernels() -> tuple[Any, Any, Any]:
    """(forward, backward, `neuronxcc.nki.language`); imported where they are called, because the import starts the SDK."""
    importlib.import_module("jax_neuronx")  # has JAX know calls of NKI kernels
    language: Any = importlib.import_module("neuronxcc.nki.language")
    attention: Any = importlib.import_module("neuronxcc.nki.kernels.attention")
    return functools.partial(_forward_kernel, attention), attention.flash_attn_bwd, language


def _forward_kernel(attention: Any, grid: tuple[Any, ...], tile: int, *operands: Any, **options: Any) -> Any:
    config = attention.FlashConfig(seq_tile_size=tile, training=True)
    return attention.flash_fwd[grid](*operands, **options, config=config)


def _grid(language: Any, rows: int, heads: int) -> tuple[int, Any]:
    """One program for each row and head, the heads spread over the two physical cores of a device where they are even."""
    return rows, heads if heads % 2 else language.nc(2) * (heads // 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(
    query: jax.Array, key: jax.Array, value: jax.Array, hidden: jax.Array | None, static: _Static
) -> jax.Array:
    return _forward(query, key, value, hidden, static)[0]


def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, hidden: jax.Array | None, static: _Static
) -> tuple[jax.Array, Any]:
    forward, _, language = _kernels()
    q, k = (jnp.transpose(x, (0, 2, 3, 1)) for x in (query, key))
    v = jnp.swapaxes(value, 1, 2)
    bias = None if hidden is None else hidden[:, None]
    out, statistics = forward(
        _grid(language, q.shape[0], q.shape[1]),
        static.tile,
        *(q, k, v, jnp.zeros((1,), jnp.int32)),  # a seed of the dropout that there is not
        logit_bias=bias,
        softmax_scale=static.scale,
        use_causal_mask=static.causal,
        mixed_precision=True,
        dropout_p=0.0,
    )
    out = checkpoint_name(jnp.swapaxes(out, 1, 2), "context")
    return out, (query, key, value, hidden, out, checkpoint_name(statistics, "context"))


def _backward(static: _Static, residuals: Any, gradient: jax.Array) -> tuple[Any, ...]:
    query, key, value, hidden, out, statistics = residuals
    _, backward, language = _kernels()
    q, k, v, o, dy = (jnp.transpose(x, (0, 2, 3, 1)) for x in (query, key, value, out, gradient))
    grads = backward[_grid(language, q.shape[0], q.shape[1])](
        *(q, k, v, o, dy, statistics, jnp.zeros((1,), jnp.int32)),
        logit_bias_ref=None if hidden is None else hidden[:, None],
        use_causal_mask=static.causal,
        mixed_precision=True,
        dropout_p=0.0,
        softmax_scale=static.scale,
    )
    return (*(jnp.transpose(g, (0, 3, 1, 2)) for g in grads), None)


_attention.defvjp(_forward, _backward)
