"""Attention by cuDNN: FlashAttention-2 on Ampere, FlashAttention-3's schedule on Hopper, and Blackwell's own.

Causal masks and sliding windows are cuDNN's, which skips what they hide. Whatever else a mask says is added to the scores
as a bias of 0 or -infinity, [B, 1, Q, K] in the dtype of the queries.

It calls JAX's binding of cuDNN below its public function (`jax.nn.dot_product_attention`) for two reasons. That one asks the
GPU of this machine what it can do, and here programs are compiled for others. And its residuals have no names: a backward
pass that was told to keep the context would still run the forward pass again, for the softmax statistics.
"""

import functools
from collections.abc import Sequence
from inspect import signature
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from axlearn_core.contracts.kernels import KernelContext
from axlearn_plugins_gpu import compat
from axlearn_plugins_gpu.chips import CHIPS, unknown_gpu
from axlearn_plugins_gpu.kernels.heads import by_heads
from axlearn_plugins_gpu.kernels.masks import structure
from axlearn_plugins_transformer.kernels.attention import AttentionOp

cudnn = compat.cudnn()

VERSION = 91000
"""The cuDNN that programs are made for, 9.10: the oldest one that has all that `supports` says."""


class _Static(NamedTuple):
    """What of a call is known while tracing."""

    scale: float
    mask: Any  # cudnn.MaskType
    window: int | None
    biased: bool


class _CuDNN:
    """See the module."""

    tags_result = True

    def supports(self, op: AttentionOp, context: KernelContext) -> str | None:
        """16-bit numbers; heads up to 128, 256 from Hopper on, where values may have a size of their own; no soft cap."""
        if reason := unknown_gpu(context.target):
            return reason
        query, key, value = (x.shape for x in (op.query, op.key, op.value))
        if dtype := next((d for d in op.dtypes.values() if d not in ("bfloat16", "float16")), None):
            return f"it takes bfloat16 and float16, not {dtype}"
        if len(set(op.dtypes.values())) > 1:
            return "queries, keys and values differ in dtype"
        if op.softcap is not None:
            return "it has no soft cap"
        if op.bias is not None:
            return "it takes no bias on the scores whose gradient is needed"
        hopper = CHIPS[context.target].capability >= (9, 0)
        largest = 256 if hopper else 128
        for size in (query[3], value[3]):
            if size > largest or size % 8:
                return f"the head size {size} is not a multiple of 8 up to {largest}"
        if query[3] != value[3] and not hopper:
            return "queries and values of different head sizes need Hopper or later"
        if not op.aligned and query[1] == 1:
            return "decoding reads the cache once, which XLA does too"
        if context.gradients and (query[1] % 2 or key[1] % 2):
            return f"the lengths {query[1]} and {key[1]} are not both even"
        return None

    def __call__(self, op: AttentionOp) -> jax.Array:
        """[B, S, N, V]."""
        query, key = op.query, op.key
        causal, window, rest = structure(op.mask, (query.shape[1], key.shape[1]), op.aligned)
        hidden = None
        if rest is not None:
            visible = rest.materialize((0, query.shape[1]), (0, key.shape[1]), op.query_slots, op.key_slots)
            # Half of the least number: two of them still add up to one, not to an infinity that is NaN when subtracted.
            hidden = jnp.where(visible, 0, jnp.finfo(query.dtype).min / 2).astype(query.dtype)[:, None]
        kind = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
        static = _Static(scale=op.scale, mask=kind, window=window, biased=hidden is not None)
        run = functools.partial(_attend, static=static)
        return by_heads(run, query, key, op.value, hidden)


CUDNN = _CuDNN()


def _attend(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None, *, static: _Static
) -> jax.Array:
    bias = jnp.zeros(0, query.dtype) if bias is None else bias
    return _attention(query, key, value, bias, static)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array, static: _Static) -> jax.Array:
    return _run(query, key, value, bias, static, training=False)[0]


# Versions of JAX from 0.11 on have a function of the scores there.
_NEWER = {"score_mod": None} if "score_mod" in signature(cudnn._dot_product_attention_fwd_rule).parameters else {}


def _bind(primitive: Any, static: _Static, operands: Sequence[jax.Array], *rest: jax.Array, **options: bool) -> Any:
    """Of the operands queries, keys, values and bias; lengths, offsets and pages are not used."""
    unused = jnp.zeros(0, operands[0].dtype)
    settings = {
        "scale": static.scale,
        "seed": 42,  # of the dropout that there is not
        "dropout_rate": 0.0,
        "variadic_args": (static.biased, False),  # whether there is a bias, and a gradient by it
        "mask_type": static.mask,
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": static.window,
    }
    return primitive.bind(*operands, *(unused,) * 6, *rest, **settings, **_NEWER, **options)


def _run(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array, static: _Static, training: bool) -> Any:
    """(the result,), and when training the softmax statistics too."""
    primitive: Any = cudnn._dot_product_attention_fwd_p_wrapper
    return _bind(primitive, static, (query, key, value, bias), is_training=training)


def _forward(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array, static: _Static) -> Any:
    out, statistics = _run(query, key, value, bias, static, training=True)
    out, statistics = checkpoint_name(out, "context"), checkpoint_name(statistics, "context")
    return out, (query, key, value, bias, out, statistics)


def _backward(static: _Static, residuals: Any, gradient: jax.Array) -> tuple[Any, ...]:
    *operands, out, statistics = residuals
    primitive: Any = cudnn._dot_product_attention_bwd_p_wrapper
    grads = _bind(primitive, static, operands, statistics, out, gradient)
    return (*grads[:3], None)


_attention.defvjp(_forward, _backward)
