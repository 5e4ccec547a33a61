"""Splash attention (`jax.experimental.pallas.ops.tpu.splash_attention`), which skips blocks that the mask hides.

B batch, S positions, N query heads, G key-value heads, H head size, V value size.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks

from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.kernels import selection
from axlearn_plugins_tpu.kernels.blocks import LANES, SPLASH, SplashBlocks, largest_divisor, shrink_blocks
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.masks import Causal, Chunks, Mask, Or, Prefix, Segments, SlidingWindow
from axlearn_plugins_transformer.kernels.per_device import per_device, split_over

RESIDUALS = "attention_residuals"
"""Checkpoint name of the backward kernel's residuals: the result [N, S, V], and log Z [N, S] in float32."""

QUERY_AXES = ("batch", None, "activation_heads", None)
KEY_AXES = ("batch", None, "activation_kv", None)
SINK_AXES = ("activation_heads",)

_PARTS = re.compile(r"full|causal|segments|slidingwindow\(\d+\)|chunks\(\d+\)|\(causal \| prefix\)")


@attrs.frozen
class Structure:
    """A mask in the form that the kernel needs.

    Attributes:
        causal: Whether later keys are hidden.
        window: Number of most recent keys that a query sees, or None for no limit.
        chunk: Size of the chunks of a causal mask, or None.
        segments: Document ids.
        prefix: int32 [B], number of leading keys that every query sees.
    """

    causal: bool
    window: int | None
    chunk: int | None
    segments: Segments | None
    prefix: jax.Array | None

    @classmethod
    def from_mask(cls, mask: Mask) -> "Structure":
        """Build the structure from a mask that `supports` accepted."""
        parts: list[Any] = list(mask.parts)
        windows = [p.size for p in parts if isinstance(p, SlidingWindow)]
        segments = [p for p in parts if isinstance(p, Segments)]
        either = [p for p in parts if isinstance(p, Or)]
        prefix = [m.length for p in either for m in p.masks if isinstance(m, Prefix)]
        causal = bool(either) or any(isinstance(p, Causal) for p in parts)
        chunks = [p.size for p in parts if isinstance(p, Chunks)]
        return cls(
            causal=causal,
            window=min(windows, default=None),
            chunk=chunks[0] if chunks else None,
            segments=segments[0] if segments else None,
            prefix=prefix[0] if prefix else None,
        )

    def static(self, length: int) -> splash_masks.Mask:
        """Return the part of the mask that is known while tracing."""
        shape = (length, length)
        if self.prefix is not None:
            return _CausalFrom(length)
        if self.chunk is not None:
            return splash_masks.ChunkedCausalMask(shape, self.chunk)
        if self.window is not None:
            return splash_masks.LocalMask(shape, (self.window - 1, 0 if self.causal else None), 0)
        return splash_masks.CausalMask(shape) if self.causal else splash_masks.FullMask(shape)


class _CausalFrom(splash_masks.Mask):
    """Causal mask whose query positions are known only at run time, so no block can be skipped statically.

    A query that sees the first L keys and the keys up to its own position is a causal query at position max(L - 1,
    position).
    """

    def __init__(self, length: int):
        self.q_sequence = np.arange(length, dtype=np.int32)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.q_sequence), len(self.q_sequence))

    @staticmethod
    def mask_function(q_ids: jax.Array, kv_ids: jax.Array) -> jax.Array:
        """Compute the mask in the kernel."""
        return q_ids >= kv_ids

    def __getitem__(self, idx: Sequence[slice]) -> np.ndarray:
        rows, columns = (len(range(*s.indices(len(self.q_sequence)))) for s in idx)
        return np.arange(rows * columns).reshape(rows, columns) == 0  # neither all true nor all false

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _CausalFrom) and other.shape == self.shape

    def __hash__(self) -> int:
        return hash((type(self), self.shape))


class _Splash:
    """Splash attention kernel: blockwise forward and backward passes, without S x S arrays in memory."""

    def supports(self, op: AttentionOp, context: KernelContext) -> str | None:
        """Support self-attention with causal, sliding-window, chunk, prefix and segment masks."""
        (_, length, heads, _), groups, mask = op.query.shape, op.key.shape[2], op.mask.describe()
        dtypes = {str(x.dtype) for x in (op.query, op.key, op.value)}
        if not op.aligned:
            return "queries and keys are not at the same positions"
        if op.bias is not None:
            return f"it does not support a bias on the scores ({op.bias.describe()})"
        if unknown := [p for p in mask.split(" & ") if not _PARTS.fullmatch(p)]:
            return f"it does not support this mask ({' & '.join(unknown)})"
        parts = [p.split("(")[0] or "prefix" for p in mask.split(" & ")]
        if "prefix" in parts and set(parts) - {"prefix", "segments"}:
            return f"it supports a prefix only with a plain causal mask ({mask})"
        if "chunks" in parts and ("slidingwindow" in parts or "causal" not in parts or parts.count("chunks") > 1):
            return f"it supports chunks only with a plain causal mask ({mask})"
        if length % LANES:
            return f"the sequence length {length} is not a multiple of {LANES}"
        if heads % groups:
            return f"{groups} key-value heads do not divide {heads} query heads"
        if mask.count("segments") > 1 or mask.count("prefix") > 1:
            return f"it supports one set of segments and one prefix ({mask})"
        if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float32"}:
            return f"queries, keys and values must have the same dtype, bfloat16 or float32, got {', '.join(sorted(dtypes))}"
        over = split_over(op.query.shape, QUERY_AXES)[2]
        if op.sinks is not None and (over_of_sinks := split_over(op.sinks.shape, SINK_AXES)[0]) != over:
            got, expected = (" and ".join(axes) or "no mesh axis" for axes in (over_of_sinks, over))
            return f"the sinks are sharded over {got}, but the heads over {expected}"
        return None

    def __call__(self, op: AttentionOp) -> jax.Array:
        """Return the attention output, [B, S, N, V]."""
        query, key, value, structure = op.query, op.key, op.value, Structure.from_mask(op.mask)
        kernel_selection = selection.get_active_selection()
        blocks = SPLASH.get(kernel_selection.target if kernel_selection else "", SPLASH[""])
        if split_over(query.shape, QUERY_AXES)[2] != split_over(key.shape, KEY_AXES)[2]:
            # There are fewer key-value heads than devices that share the heads, so each device needs a copy for its
            # queries.
            repeats = query.shape[2] // key.shape[2]
            key, value = jnp.repeat(key, repeats, axis=2), jnp.repeat(value, repeats, axis=2)
        ids = (None, None) if structure.segments is None else (structure.segments.queries, structure.segments.keys)
        ids = tuple(None if x is None else jnp.broadcast_to(x, (query.shape[0], x.shape[1])) for x in ids)
        prefix = None if structure.prefix is None else jnp.broadcast_to(structure.prefix, query.shape[:1])
        run = functools.partial(
            _local, structure=attrs.evolve(structure, segments=None), softcap=op.softcap, blocks=blocks
        )
        axes = [QUERY_AXES, KEY_AXES, KEY_AXES, *(None if x is None else ("batch", None) for x in ids)]
        axes += [None if structure.prefix is None else ("batch",), None if op.sinks is None else SINK_AXES]
        spread = per_device(run, axes, QUERY_AXES)
        sinks = (
            None if op.sinks is None else op.sinks.astype(query.dtype)
        )  # their gradients have the dtype of the result
        return spread(query * op.scale, key, value, *ids, prefix, sinks)


def _local(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_ids: jax.Array | None,
    key_ids: jax.Array | None,
    prefix: jax.Array | None,
    sinks: jax.Array | None,
    *,
    structure: Structure,
    softcap: float | None,
    blocks: SplashBlocks,
) -> jax.Array:
    """Attend on one device.

    Args:
        query: [B, S, N, H].
        key: [B, S, G, H].
        value: [B, S, G, V].
        query_ids: int32 [B, S].
        key_ids: int32 [B, S].
        prefix: int32 [B].
        sinks: [N].
        structure: Mask without its segments.
        softcap: Cap on the scores.
        blocks: Block sizes.

    Returns:
        [B, S, N, V].
    """
    length, heads = query.shape[1:3]
    blocks = shrink_blocks(blocks, max(query.shape[3], value.shape[3]) * query.dtype.itemsize)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    kernel = splash.make_splash_mha(
        splash_masks.MultiHeadMask([structure.static(length)] * heads),
        block_sizes=_block_sizes(blocks, length),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name=RESIDUALS,
    )
    ids = None if query_ids is None or key_ids is None else splash.SegmentIds(query_ids, key_ids)

    def one_row(
        q: jax.Array, k: jax.Array, v: jax.Array, ids: splash.SegmentIds | None, row_visible: jax.Array | None
    ) -> Any:
        return (kernel if row_visible is None else _apply_prefix(kernel, row_visible))(q, k, v, ids, sinks)

    return jnp.swapaxes(jax.vmap(one_row)(q, k, v, ids, prefix), 1, 2)


def _apply_prefix(kernel: splash.SplashAttentionKernel, prefix: jax.Array) -> splash.SplashAttentionKernel:
    """Return the kernel for a row in which every query sees the first `prefix` keys."""

    def shift_positions(info: Any) -> Any:
        return None if info is None else info._replace(q_sequence=jnp.maximum(info.q_sequence, prefix - 1))

    infos = (
        shift_positions(kernel.fwd_mask_info),
        shift_positions(kernel.dq_mask_info),
        shift_positions(kernel.dkv_mask_info),
    )
    return splash.SplashAttentionKernel(*infos, **kernel.kwargs)


def _block_sizes(blocks: SplashBlocks, length: int) -> splash.BlockSizes:
    """Return the table's block sizes, reduced to divisors of the length."""
    key, back_key = largest_divisor(length, blocks.key), largest_divisor(length, blocks.backward_key)
    back_query = largest_divisor(length, blocks.backward_query)
    fused = length // back_key <= blocks.max_fused_blocks
    return splash.BlockSizes(
        block_q=largest_divisor(length, blocks.query),
        block_kv=key,
        block_kv_compute=largest_divisor(key, blocks.key_compute),
        block_q_dkv=back_query,
        block_kv_dkv=back_key,
        block_kv_dkv_compute=largest_divisor(back_key, blocks.backward_key_compute),
        block_q_dq=None if fused else back_query,
        block_kv_dq=None if fused else back_key,
        use_fused_bwd_kernel=fused,
    )


SPLASH_ATTENTION = _Splash()
