"""Attention, using tokamax's FlashAttention: in Mosaic GPU on Hopper and Blackwell, and in Triton.

Both kernels have lower priority than cuDNN and cover calls that it does not support: soft caps (Mosaic) and large heads on Ampere
(Triton). Causal masks and sliding windows become ranges of keys, and the forward pass skips keys outside them. The rest of a mask
is a boolean array [B, 1, Q, K]. The backward pass skips only keys that a causal mask hides. On Blackwell, Mosaic's backward pass
in tokamax 0.0.12 skips nothing. Triton's backward pass also gets a window as a boolean array.
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
    attention_blocks,
)
from axlearn_plugins_gpu.kernels.heads import run_per_device
from axlearn_plugins_gpu.kernels.masks import split_mask
from axlearn_plugins_gpu.kernels.mosaic import HOPPER, refusal, use_mosaic_target
from axlearn_plugins_transformer.kernels.attention import AttentionOp

_STABLE = {"use_stable_softmax": True}
"""With a soft cap, tokamax would not subtract the largest score by default, so the exponential would overflow float16."""


class _Static(NamedTuple):
    """Static parameters for a call."""

    target: str
    scale: float
    softcap: float | None
    causal: bool
    window: int | None
    mosaic: bool


class _Tokamax:
    """Base class for both kernels: self-attention in a single 16-bit dtype."""

    mosaic: bool
    tags_result = True

    def supports(self, op: AttentionOp, context: KernelContext) -> str | None:
        """Support 16-bit dtypes, whole blocks of positions, and head sizes that the table has blocks for."""
        if reason := tokamax.unavailable_reason() or unknown_gpu(context.target):
            return reason
        if self.mosaic and (reason := refusal(context.target)):
            return reason
        dtypes = set(op.dtypes.values())
        if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float16"}:
            return f"all operands must have the same dtype, bfloat16 or float16, got {', '.join(sorted(dtypes))}"
        if not op.aligned:
            return "queries and keys are not at the same positions"
        if op.bias is not None:
            return f"it does not support a bias on the scores ({op.bias.describe()})"
        if op.softcap is not None and context.gradients and not self.mosaic:
            return "its backward pass does not support a soft cap"
        if op.value.shape[3] != op.query.shape[3]:
            return "queries and values differ in head size"
        return self._check_shapes(op, context)

    def _check_shapes(self, op: AttentionOp, context: KernelContext) -> str | None:
        length, size = op.query.shape[1], op.query.shape[3]
        blocks = attention_blocks(_tables(self.mosaic), context.target, size)
        if blocks is None:
            return f"it has no block sizes for heads of {size}"
        if length % blocks.multiple:
            return f"the sequence length {length} is not a multiple of {blocks.multiple}"
        if not context.gradients:
            return None
        if blocks.backward is None:
            return f"its backward pass has no block sizes for heads of {size} on {context.target}"
        if blocks.backward.longest is not None and length > blocks.backward.longest:
            return f"its backward pass supports up to {blocks.backward.longest} positions on {context.target}, not {length}"
        return None

    def __call__(self, op: AttentionOp) -> jax.Array:
        """Return the attention output, [B, S, N, V]."""
        kernel_selection: Any = selection.get_active_selection()  # not None: `supports` accepts only known GPUs
        length = op.query.shape[1]
        causal, window, other_mask = split_mask(op.mask, (length, length), aligned=True)
        static = _Static(kernel_selection.target, op.scale, op.softcap, causal, window, self.mosaic)
        visible = None if other_mask is None else other_mask.materialize((0, length), (0, length))[:, None]
        run = functools.partial(_attend, static=static)
        return run_per_device(run, op.query, op.key, op.value, visible)


class _Mosaic(_Tokamax):
    """Mosaic GPU kernel with separate warp groups for loads and matmuls."""

    mosaic = True


class _Triton(_Tokamax):
    """Triton kernel, FlashAttention-2."""

    mosaic = False


MOSAIC_ATTENTION, TRITON = _Mosaic(), _Triton()


def _tables(mosaic: bool) -> Tables:
    if not mosaic:
        return TRITON_ATTENTION
    return MOSAIC_LATER if tokamax.LATER else MOSAIC


def _kernel(static: _Static, size: int) -> Any:
    """Return tokamax's op, with block sizes for the forward and backward pass."""
    blocks = attention_blocks(_tables(static.mosaic), static.target, size)
    assert blocks is not None, "`supports` checks this"
    if not static.mosaic:
        return _triton(blocks)
    return _hopper(blocks) if CHIPS[static.target].capability == HOPPER else _blackwell(blocks)


_MODULE = "ops.attention.pallas_mosaic_gpu"


def _mosaic(config: Any, backward: Any) -> Any:
    derivative = (
        None if backward is None else tokamax.module(f"{_MODULE}_vjp").PallasMosaicGpuFlashAttentionVjp(config=backward)
    )
    return tokamax.module(_MODULE).PallasMosaicGpuFlashAttention(config=config, vjp=derivative, **_STABLE)


def _hopper(blocks: AttentionBlocks) -> Any:
    forward, backward_module = (tokamax.module(f"{_MODULE}{part}_kernel_sm90") for part in ("", "_vjp"))
    config = forward.Config(block_q=blocks.query, block_kv=blocks.key, num_stages=blocks.stages)
    return _mosaic(config, blocks.backward and _two_kernels(backward_module, blocks.backward))


def _two_kernels(module: Any, blocks: Backward) -> Any:
    return module.Config(
        block_q_dkv=blocks.query,
        block_kv_dkv=blocks.key,
        block_q_dq=blocks.key,
        block_kv_dq=blocks.query,
        num_stages=blocks.stages,
    )


def _one_kernel(module: Any, blocks: Backward) -> Any:
    return module.Config(block_q=blocks.query, block_kv=blocks.key, num_stages=blocks.stages)


def _blackwell(blocks: AttentionBlocks) -> Any:
    forward, backward_module = (tokamax.module(f"{_MODULE}{part}_kernel_sm100") for part in ("", "_vjp"))
    config = forward.Config(
        block_q=blocks.query,
        block_kv=blocks.key,
        num_stages=blocks.stages,
        num_tma_splits=blocks.splits,
        collective=True,
    )
    derivative = _two_kernels if tokamax.LATER else _one_kernel
    return _mosaic(config, blocks.backward and derivative(backward_module, blocks.backward))


def _triton(blocks: AttentionBlocks) -> Any:
    name = "ops.attention.pallas_triton"
    forward, backward_module = tokamax.module(name), tokamax.module(f"{name}_vjp")
    config = forward.Config(block_q=blocks.query, block_k=blocks.key, num_stages=blocks.stages, num_warps=blocks.warps)
    backward = blocks.backward and backward_module.Config(
        block_m1=blocks.backward.query,
        block_n1=blocks.backward.key,
        block_m2=blocks.backward.key,
        block_n2=blocks.backward.query,
        num_stages=blocks.backward.stages,
        num_warps=blocks.backward.warps,
    )
    derivative = backward and backward_module.PallasTritonFlashAttentionVjp(config=backward)
    return forward.PallasTritonFlashAttention(config=config, vjp=derivative, **_STABLE)


def _compile_context(static: _Static) -> contextlib.AbstractContextManager[None]:
    return use_mosaic_target(static.target) if static.mosaic else tokamax.use_target(static.target)


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


# tokamax's own derivative does not name its residuals, and is traced outside `use_target`.
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
