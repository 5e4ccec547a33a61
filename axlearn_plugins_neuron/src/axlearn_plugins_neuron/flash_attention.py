"""Flash attention with the Neuron SDK (`neuronxcc.nki.kernels.attention`), forward and backward.

Layouts of the kernels, as documented by the SDK, with b rows, n heads, h head size, s positions:

    flash_fwd        q, k [b, n, h, s]; v [b, n, s, h]                  -> o [b, n, s, h], lse [b, n, 128, s / 128]
    flash_attn_bwd   q, k, v, o, dy [b, n, h, s]; lse                   -> dq, dk, dv [b, n, h, s]

A bias is [1, 1, s, s], shared by all rows and heads, so masks that differ between rows are processed row by row. The
kernels need the SDK. The rest of this module does not, and is tested with kernels written in JAX.
"""

import functools
import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from axlearn_core.contracts.kernels import KernelContext
from axlearn_plugins_neuron.sdk import unavailable_reason
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.masks import And, Causal, Full
from axlearn_plugins_transformer.kernels.per_device import per_device

TILES = (2048, 1024, 512)
"""Tile sizes for the forward kernel, in keys; the largest one that divides the number of keys is used."""

HEADS = ("batch", None, "activation_heads", None)
HIDDEN = -30_000.0
"""Bias of masked scores: low enough that exp returns zero, and representable in bfloat16."""


class _Static(NamedTuple):
    """Static parameters for a call."""

    scale: float
    causal: bool
    tile: int


class _Flash:
    """Flash attention kernel from the Neuron SDK; see the module docstring."""

    def supports(self, op: AttentionOp, context: KernelContext) -> str | None:
        """Support self-attention with head sizes up to 128 and lengths that are multiples of 512, without a soft cap or a bias."""
        if reason := unavailable_reason(("jax-neuronx", "neuronx-cc")):
            return reason
        return unsupported_reason(op)

    def __call__(self, op: AttentionOp) -> jax.Array:
        """Return the attention output, [B, S, N, V]."""
        query, key, value = op.query, op.key, op.value
        length = key.shape[1]
        parts = op.mask.parts
        other_parts = tuple(p for p in parts if not isinstance(p, (Causal, Full)))
        hidden = None
        if other_parts:
            visible = And(other_parts).materialize((0, query.shape[1]), (0, length))
            hidden = jnp.where(visible, 0.0, HIDDEN).astype(query.dtype)
        causal = any(isinstance(p, Causal) for p in parts)
        static = _Static(op.scale, causal, next(t for t in TILES if length % t == 0))
        # The backward kernel needs as many key heads as query heads.
        repeats = query.shape[2] // key.shape[2]
        if repeats > 1:
            key, value = jnp.repeat(key, repeats, axis=2), jnp.repeat(value, repeats, axis=2)
        rows = None if hidden is None else ("batch" if hidden.shape[0] > 1 else None, None, None)
        run = functools.partial(_attend, static=static)
        return per_device(run, [HEADS, HEADS, HEADS, rows], HEADS)(query, key, value, hidden)


NKI_FLASH = _Flash()


def unsupported_reason(op: AttentionOp) -> str | None:
    """Return why the kernels cannot compute a call, or None. Does not check that the SDK is installed."""
    query, key, value = (x.shape for x in (op.query, op.key, op.value))
    if len(set(op.dtypes.values())) > 1:
        return "queries, keys and values differ in dtype"
    if op.softcap is not None:
        return "it does not support a soft cap"
    if op.bias is not None:
        return "it does not support a bias on the scores that needs a gradient"
    if not op.aligned:
        return "queries and keys are not at the same positions"
    if query[3] > 128 or query[3] != value[3]:
        return f"it needs one head size of at most 128, got {query[3]} and {value[3]}"
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

    return lax.map(row, (query, key, value, hidden))  # each row has its own bias


def _kernels() -> tuple[Any, Any, Any]:
    """Return (forward, backward, `neuronxcc.nki.language`). Imported on use, because the import starts the SDK."""
    importlib.import_module("jax_neuronx")  # registers NKI kernel calls with JAX
    language: Any = importlib.import_module("neuronxcc.nki.language")
    attention: Any = importlib.import_module("neuronxcc.nki.kernels.attention")
    return functools.partial(_forward_kernel, attention), attention.flash_attn_bwd, language


def _forward_kernel(attention: Any, grid: tuple[Any, ...], tile: int, *operands: Any, **options: Any) -> Any:
    config = attention.FlashConfig(seq_tile_size=tile, training=True)
    return attention.flash_fwd[grid](*operands, **options, config=config)


def _grid(language: Any, rows: int, heads: int) -> tuple[int, Any]:
    """Return a grid with one program per row and head. An even number of heads is split between a device's two cores."""
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
        *(q, k, v, jnp.zeros((1,), jnp.int32)),  # the last one is a seed for dropout, which is off
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
