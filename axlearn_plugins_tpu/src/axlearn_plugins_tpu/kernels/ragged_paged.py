"""The `paged_attention` op, using ragged paged attention (`jax.experimental.pallas.ops.tpu.ragged_paged_attention`).

The kernel prefetches the next block of pages while it processes one, and reads only the pages that a request has.
"""

import functools
import math

import jax
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as library

from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.kernels import selection
from axlearn_plugins_tpu.kernels.blocks import LANES, PAGED
from axlearn_plugins_tpu.kernels.chip import use_target_chip
from axlearn_plugins_transformer.kernels.paged_attention import PagedAttentionOp
from axlearn_plugins_transformer.kernels.per_device import count_shards, per_device

QUERY_AXES = (None, "activation_heads", None)
PAGE_AXES = (None, None, "activation_kv", None)
MAX_ENTRIES = 2**17
"""Maximum number of entries in the page table: half of a core's scalar memory."""
BYTES = {"bfloat16": 2, "float32": 4}


class _RaggedPaged:
    """Ragged paged attention kernel. A block of queries iterates over blocks of its requests' pages."""

    def supports(self, op: PagedAttentionOp, context: KernelContext) -> str | None:
        """Support bfloat16 or float32, head size 128, enough heads to fill the registers, and a limited page table."""
        if op.bias is not None:
            return "it does not support a bias on the scores"
        if op.scales is not None:
            return "it does not support pages with scales"
        if op.heads_first or op.value_size is not None:
            return "it needs pages of [pages, slots, heads, head size], with separate keys and values"
        (_, heads, size), (_, _, num_heads, _) = op.query.shape, op.pages.shape
        dtypes = {op.dtypes[name] for name in ("query", "pages")}
        if len(dtypes) > 1 or not dtypes <= BYTES.keys():
            return f"all operands must have the same dtype, bfloat16 or float32, got {', '.join(sorted(dtypes))}"
        if size != LANES:
            return f"it needs head size {LANES}, got {size}"
        if (entries := math.prod(op.table.shape)) > MAX_ENTRIES:
            return f"the page table has {entries} entries, more than the limit of {MAX_ENTRIES}"
        queries, keys = (
            count_shards((1, heads, size), QUERY_AXES)[1],
            count_shards((1, 1, num_heads, size), PAGE_AXES)[2],
        )
        if queries != keys or (num_heads // 2) % keys:
            return f"{num_heads // 2} key-value heads cannot be split over {max(queries, keys)} devices"
        packed, remainder = divmod(num_heads // keys, 4 // BYTES[dtypes.pop()])
        if remainder or not (packed in (1, 2, 4, 8) or packed % 8 == 0):
            return f"{num_heads // keys // 2} key-value heads per device do not fill the registers"
        return None

    def __call__(self, op: PagedAttentionOp) -> jax.Array:
        """Return the attention output, [T, N, H]."""
        query, pages, table = op.query, op.pages, op.table
        kernel_selection = selection.get_active_selection()
        blocks = PAGED.get(kernel_selection.target if kernel_selection else "", PAGED[""])
        run = functools.partial(
            library.ragged_paged_attention,
            sm_scale=op.scale,
            sliding_window=op.window,
            soft_cap=op.softcap,
            num_kv_pages_per_block=max(1, min(table.shape[1], blocks.keys // pages.shape[1])),
            num_queries_per_block=min(query.shape[0], blocks.queries),
        )
        axes = [QUERY_AXES, PAGE_AXES, (None,), (None, None), (None,), (None,)]
        return per_device(use_target_chip()(run), axes, QUERY_AXES)(
            query, pages, op.lengths, table, op.starts, op.count
        )


RAGGED_PAGED = _RaggedPaged()
