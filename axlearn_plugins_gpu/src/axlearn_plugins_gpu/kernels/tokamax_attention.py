"""Attention by tokamax's FlashAttention: in Mosaic GPU on Hopper and Blackwell, and in Triton.

They stand behind cuDNN and serve what it does not: soft caps (Mosaic), large heads on Ampere (Triton). Causal masks and sliding
windows are ranges of keys, outside of which the forward pass skips; whatever else a mask says is an array of booleans [B, 1, Q, K].
The backward pass skips only what is ahead of a causal mask, Mosaic's of tokamax 0.0.12 on Blackwell nothing; Triton's takes a
window as booleans too.
"""

import contextlib
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.kernels import selection
from axlearn_plugins_gpu.chips import CHIPS, unknown_gpu
from axlearn_plugins_gpu.kernels import tokamax
from axlearn_plugins_gpu.kernels.blocks import (
    MOSAIC,
    MOSAIC_LATER,
    TRITON_ATTENTION,
    AttentionBlocks,
    Backward,
    Tables,
    attending,
)
from axlearn_plugins_gpu.kernels.heads import by_heads
from axlearn_plugins_gpu.kernels.masks import structure
from axlearn_plugins_gpu.kernels.mosaic import HOPPER, compiling_for, refusal
from axlearn_plugins_transformer.kernels.attention import AttentionOp

_STABLE = {"use_stable_softmax": True}
"""With a soft cap tokamax would leave the largest score in, whose exponential is more than float16 can hold."""


class _Static(NamedTuple):
    """What of a call is known while tracing."""

    target: str
    scale: float
    softcap: float | None
    causal: bool
    window: int | None
    mosaic: bool


class _Tokamax:
    """Self-attention in one dtype of 16 bits."""

    mosaic: bool
    tags_result = True

    def supports(self, op: AttentionOp, context: KernelContext) -> str | None:
        """16-bit numbers, positions in whole blocks, heads that its table has blocks for."""
        if reason := tokamax.missing() or unknown_gpu(context.target):
            return reason
        if self.mosaic and (reason := refusal(context.target)):
            return reason
        dtypes = set(op.dtypes.values())
        if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float16"}:
            return f"the dtypes are {', '.join(sorted(dtypes))}; it takes bfloat16, or float16"
        if not op.aligned:
            return "queries and keys are not the same positions"
        if op.bias is not None:
            return f"it is given no bias on the scores ({op.bias.describe()})"
        if op.softcap is not None and context.gradients and not self.mosaic:
            return "its backward pass has no soft cap"
        if op.value.shape[3] != op.query.shape[3]:
            return "queries and values differ in head size"
        return self._does_not_fit(op, context)

    def _does_not_fit(self, op: AttentionOp, context: KernelContext) -> str | None:
        length, size = op.query.shape[1], op.query.shape[3]
        blocks = attending(_tables(self.mosaic), context.target, size)
        if blocks is None:
            return f"it has no blocks for heads of {size}"
        if length % blocks.multiple:
            return f"the sequence length {length} is not a multiple of {blocks.multiple}"
        if not context.gradients:
            return None
        if blocks.back is None:
            return f"its backward pass has no blocks for heads of {size} on {context.target}"
        if blocks.back.longest is not None and length > blocks.back.longest:
            return f"its backward pass takes up to {blocks.back.longest} positions on {context.target}, not {length}"
        return None

    def __call__(self, op: AttentionOp) -> jax.Array:
        """[B, S, N, V]."""
        kernel_selection: Any = (
            selection.in_force()
        )  # where there is none, `supports` has said that the GPU is not known
        length = op.query.shape[1]
        causal, window, rest = structure(op.mask, (length, length), aligned=True)
        static = _Static(kernel_selection.target, op.scale, op.softcap, causal, window, self.mosaic)
        visible = None if rest is None else rest.materialize((0, length), (0, length))[:, None]
        run = functools.partial(_attend, static=static)
        return by_heads(run, op.query, op.key, op.value, visible)


class _Mosaic(_Tokamax):
    """Warp groups for loads and for products."""

    mosaic = True


class _Triton(_Tokamax):
    """FlashAttention-2."""

    mosaic = False


MOSAIC_ATTENTION, TRITON = _Mosaic(), _Triton()


def _tables(mosaic: bool) -> Tables:
    if not mosaic:
        return TRITON_ATTENTION
    return MOSAIC_LATER if tokamax.LATER else MOSAIC


def _kernel(static: _Static, size: int) -> Any:
    """tokamax's op with its block sizes, and with those of its derivative."""
    blocks = attending(_tables(static.mosaic), static.target, size)
    assert blocks is not None, "`supports` has said no"
    if not static.mosaic:
        return _triton(blocks)
    return _hopper(blocks) if CHIPS[static.target].capability == HOPPER else _blackwell(blocks)


_PLACE = "ops.attention.pallas_mosaic_gpu"


def _mosaic(config: Any, back: Any) -> Any:
    derivative = None if back is None else tokamax.module(f"{_PLACE}_vjp").PallasMosaicGpuFlashAttentionVjp(config=back)
    return tokamax.module(_PLACE).PallasMosaicGpuFlashAttention(config=config, vjp=derivative, **_STABLE)


def _hopper(blocks: AttentionBlocks) -> Any:
    forward, backward = (tokamax.module(f"{_PLACE}{part}_kernel_sm90") for part in ("", "_vjp"))
    config = forward.Config(block_q=blocks.query, block_kv=blocks.key, num_stages=blocks.stages)
    return _mosaic(config, blocks.back and _two_kernels(backward, blocks.back))


def _two_kernels(backward: Any, back: Backward) -> Any:
    return backward.Config(
        block_q_dkv=back.query,
        block_kv_dkv=back.key,
        block_q_dq=back.key,
        block_kv_dq=back.query,
        num_stages=back.stages,
    )


def _one_kernel(backward: Any, back: Backward) -> Any:
    return backward.Config(block_q=back.query, block_kv=back.key, num_stages=back.stages)


def _blackwell(blocks: AttentionBlocks) -> Any:
    forward, backward = (tokamax.module(f"{_PLACE}{part}_kernel_sm100") for part in ("", "_vjp"))
    config = forward.Config(
        block_q=blocks.query,
        block_kv=blocks.key,
        num_stages=blocks.stages,
        num_tma_splits=blocks.splits,
        collective=True,
    )
    derivative = _two_kernels if tokamax.LATER else _one_kernel
    return _mosaic(config, blocks.back and derivative(backward, blocks.back))


def _triton(blocks: AttentionBlocks) -> Any:
    place = "ops.attention.pallas_triton"
    forward, backward = tokamax.module(place), tokamax.module(f"{place}_vjp")
    config = forward.Config(block_q=blocks.query, block_k=blocks.key, num_stages=blocks.stages, num_warps=blocks.warps)
    back = blocks.back and backward.Config(
        block_m1=blocks.back.query,
        block_n1=blocks.back.key,
        block_m2=blocks.back.key,
        block_n2=blocks.back.query,
        num_stages=blocks.back.stages,
        num_warps=blocks.back.warps,
    )
    derivative = back and backward.PallasTritonFlashAttentionVjp(config=back)
    return forward.PallasTritonFlashAttention(config=config, vjp=derivative, **_STABLE)


def _compile_context(static: _Static) -> contextlib.AbstractContextManager[None]:
    return compiling_for(static.target) if static.mosaic else tokamax.for_target(static.target)


def _options(static: _Static, length: int, visible: jax.Array | None) -> dict[str, Any]:
    start = None
    if static.window is not None:
        start = jnp.maximum(jnp.arange(length, dtype=jnp.int32) + 1 - static.window, 0)[None]
    mask = tokamax.module("ops.attention.base").Mask(visible, k_start=start, is_causal=static.causal)
    return {"mask": mask, "logits_scale": static.scale, "logits_soft_cap": static.softcap}


def _attend(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array | None, *, static: _Static
) -> jax.Array:
    return _attention(query, key, value, visible, static)


# tokamax's own derivative gives its residuals no names, and is traced when `for_target` is over.
@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array | None, static: _Static
) -> jax.Array:
    return _run(query, key, value, visible, static, return_residuals=False)


def _run(query: Any, key: Any, value: Any, visible: Any, static: _Static, *, return_residuals: bool) -> Any:
    op = _kernel(static, query.shape[3]).replace(vjp=None)
    with _compile_context(static):
        options = _options(static, query.shape[1], visible)
        return op(query, key, value, **options, return_residuals=return_residuals)


def _forward(query: Any, key: Any, value: Any, visible: Any, static: _Static) -> Any:
    out, statistics = _run(query, key, value, visible, static, return_residuals=True)
    out = checkpoint_name(out, "context")
    statistics = jax.tree.map(lambda x: checkpoint_name(x, "context"), statistics)
    return out, (query, key, value, visible, out, statistics)


def _backward(static: _Static, residuals: Any, gradient: jax.Array) -> tuple[Any, ...]:
    query, key, value, visible, out, statistics = residuals
    op = _kernel(static, query.shape[3])
    with _compile_context(static):
        bound = op.bind(query, key, value, **_options(static, query.shape[1], visible))
        options = {k: v for k, v in bound.kwargs.items() if k != "return_residuals"}
        gradients = op.vjp(statistics, out, gradient, *bound.args, **options)
    return gradients["q"], gradients["k"], gradients["v"], None


_attention.defvjp(_forward, _backward)
