"""The op `paged_attention` by ragged paged attention (`jax.experimental.pallas.ops.tpu.ragged_paged_attention`).

It fetches a block of pages while it works on the one before, and only the pages that a request has.
"""

import functools
import math

import jax
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as library

from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.kernels import selection
from axlearn_plugins_tpu.kernels.blocks import LANES, PAGED
from axlearn_plugins_tpu.kernels.chip import known_chip
from axlearn_plugins_transformer.kernels.paged_attention import PagedAttentionOp
from axlearn_plugins_transformer.kernels.per_device import parts_of, per_device

QUERY_AXES = (None, "activation_heads", None)
PAGE_AXES = (None, None, "activation_kv", None)
ENTRIES = 2**17
"""Of the table of pages: half of a core's scalar memory."""
BYTES = {"bfloat16": 2, "float32": 4}


class _RaggedPaged:
    """Blocks of queries, each over blocks of the pages of their requests."""

    def supports(self, op: PagedAttentionOp, context: KernelContext) -> str | None:
        """bfloat16 or float32, heads of 128 numbers, as many of them as fill its registers, and a table that it can hold."""
        if op.bias is not None:
            return "it adds no bias to scores"
        if op.scales is not None:
            return "pages have scales"
        if op.heads_first or op.value_size is not None:
            return "its pages are [pages, slots, heads, head size], with keys and values apart"
        (_, heads, size), (_, _, both, _) = op.query.shape, op.pages.shape
        dtypes = {op.dtypes[name] for name in ("query", "pages")}
        if len(dtypes) > 1 or not dtypes <= BYTES.keys():
            return f"the dtypes are {', '.join(sorted(dtypes))}; it takes bfloat16, or float32"
        if size != LANES:
            return f"the head size is {size}; it takes {LANES}"
        if (entries := math.prod(op.table.shape)) > ENTRIES:
            return f"the table has {entries} entries; it has room for {ENTRIES}"
        queries, keys = parts_of((1, heads, size), QUERY_AXES)[1], parts_of((1, 1, both, size), PAGE_AXES)[2]
        if queries != keys or (both // 2) % keys:
            return f"{both // 2} key-value heads cannot be split over {max(queries, keys)} devices"
        packed, rest = divmod(both // keys, 4 // BYTES[dtypes.pop()])
        if rest or not (packed in (1, 2, 4, 8) or packed % 8 == 0):
            return f"{both // keys // 2} key-value heads on a device do not fill its registers"
        return None

    def __call__(self, op: PagedAttentionOp) -> jax.Array:
        """[T, N, H]."""
        query, pages, table = op.query, op.pages, op.table
        kernel_selection = selection.in_force()
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
        return per_device(known_chip()(run), axes, QUERY_AXES)(query, pages, op.lengths, table, op.starts, op.count)


RAGGED_PAGED = _RaggedPaged()
