"""Attention with cuDNN: FlashAttention-2 on Ampere, FlashAttention-3's schedule on Hopper, and cuDNN's own on Blackwell.

cuDNN handles causal masks and sliding windows and skips hidden blocks. The rest of a mask is added to the scores as a bias
of 0 or a large negative number, [B, 1, Q, K], in the dtype of the queries.

The module calls JAX's binding for cuDNN below `jax.nn.dot_product_attention`, for two reasons. The public function queries
the local GPU, but programs here are compiled for other GPUs. Its residuals also have no checkpoint names, so a backward
pass with a saved context would still run the forward pass again for the softmax statistics.
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
from axlearn_plugins_gpu.kernels.heads import run_per_device
from axlearn_plugins_gpu.kernels.masks import split_mask
from axlearn_plugins_transformer.kernels.attention import AttentionOp

cudnn = compat.cudnn()

VERSION = 91000
"""The cuDNN version that programs target, 9.10: the oldest one that implements everything that `supports` accepts."""


class _Static(NamedTuple):
    """Static parameters for a call."""

    scale: float
    mask: Any  # cudnn.MaskType
    window: int | None
    biased: bool


class _CuDNN:
    """cuDNN attention kernel; see the module docstring."""

    tags_result = True

    def supports(self, op: AttentionOp, context: KernelContext) -> str | None:
        """Support 16-bit dtypes and heads up to 128 (Hopper and later: 256, and values of a different size), but no soft cap."""
        if reason := unknown_gpu(context.target):
            return reason
        query, key, value = (x.shape for x in (op.query, op.key, op.value))
        if dtype := next((d for d in op.dtypes.values() if d not in ("bfloat16", "float16")), None):
            return f"it supports bfloat16 and float16, not {dtype}"
        if len(set(op.dtypes.values())) > 1:
            return "queries, keys and values differ in dtype"
        if op.softcap is not None:
            return "it does not support a soft cap"
        if op.bias is not None:
            return "it does not support a bias on the scores that needs a gradient"
        hopper = CHIPS[context.target].capability >= (9, 0)
        largest = 256 if hopper else 128
        for size in (query[3], value[3]):
            if size > largest or size % 8:
                return f"the head size {size} is not a multiple of 8 up to {largest}"
        if query[3] != value[3] and not hopper:
            return "queries and values with different head sizes require Hopper or later"
        if not op.aligned and query[1] == 1:
            return "decoding reads the cache once, which XLA does as well"
        if context.gradients and (query[1] % 2 or key[1] % 2):
            return f"the lengths {query[1]} and {key[1]} are not both even"
        return None

    def __call__(self, op: AttentionOp) -> jax.Array:
        """Return the attention output, [B, S, N, V]."""
        query, key = op.query, op.key
        causal, window, other_mask = split_mask(op.mask, (query.shape[1], key.shape[1]), op.aligned)
        hidden = None
        if other_mask is not None:
            visible = other_mask.materialize((0, query.shape[1]), (0, key.shape[1]), op.query_slots, op.key_slots)
            # Half of the lowest finite number, so that the sum of two such numbers is still finite. Subtracting infinities
            # would result in NaN.
            hidden = jnp.where(visible, 0, jnp.finfo(query.dtype).min / 2).astype(query.dtype)[:, None]
        kind = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
        static = _Static(scale=op.scale, mask=kind, window=window, biased=hidden is not None)
        run = functools.partial(_attend, static=static)
        return run_per_device(run, query, key, op.value, hidden)


CUDNN = _CuDNN()


def _attend(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None, *, static: _Static
) -> jax.Array:
    bias = jnp.zeros(0, query.dtype) if bias is None else bias
    return _attention(query, key, value, bias, static)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array, static: _Static) -> jax.Array:
    return _run(query, key, value, bias, static, training=False)[0]


# JAX 0.11 and later also accept a function that modifies the scores.
_EXTRA_PARAMETERS = (
    {"score_mod": None} if "score_mod" in signature(cudnn._dot_product_attention_fwd_rule).parameters else {}
)


def _bind(
    primitive: Any, static: _Static, operands: Sequence[jax.Array], *extra_operands: jax.Array, **options: bool
) -> Any:
    """Bind a primitive to queries, keys, values and bias; lengths, offsets and pages are not used."""
    unused = jnp.zeros(0, operands[0].dtype)
    settings = {
        "scale": static.scale,
        "seed": 42,  # for dropout, which is off
        "dropout_rate": 0.0,
        "variadic_args": (static.biased, False),  # (has a bias, needs the gradient of the bias)
        "mask_type": static.mask,
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": static.window,
    }
    return primitive.bind(*operands, *(unused,) * 6, *extra_operands, **settings, **_EXTRA_PARAMETERS, **options)


def _run(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array, static: _Static, training: bool) -> Any:
    """Return (output,), plus the softmax statistics when training."""
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
