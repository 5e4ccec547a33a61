"""Paged attention to the first keys of each request, with JAX's GPU kernel.

The library's function requires keys and values in separate arrays, with one head after the other. The op's pages interleave
keys and values, so slicing them would copy the cache. This module therefore calls the library's kernel body with its own
block specs.

Legend: see `paged_attention`; K is the number of parts into which a page table is split.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas

from axlearn_core.kernels import selection
from axlearn_plugins_gpu import compat
from axlearn_plugins_gpu.kernels.abstract_gpu import use_abstract_gpu
from axlearn_plugins_gpu.kernels.blocks import PagedBlocks, num_table_parts, paged_blocks
from axlearn_plugins_transformer.kernels.paged_attention import PagedAttentionOp

LOW = -1e30
"""Score of a hidden key."""

MIN_KEYS = 16
"""Minimum keys per block. With fewer, Triton repeats work to fill a tensor core instruction."""


class Parts(NamedTuple):
    """Partial attention results, each over a subset of the keys, in float32.

    Attributes:
        result: [K, R, G, Q, H], weighted sums of values.
        total: [K, R, G, Q], sums of weights, relative to the part's largest score.
        highest: [K, R, G, Q], largest scores; very low if a part has no keys.
    """

    result: jax.Array
    total: jax.Array
    highest: jax.Array

    def concatenate(self, other: "Parts") -> "Parts":
        """Return these parts followed by the parts of `other`."""
        return Parts(*(jnp.concatenate(pair) for pair in zip(self, other, strict=True)))

    def combine(self) -> jax.Array:
        """Return the attention over all parts, [R, G, Q, H]."""
        weights = jnp.exp(self.highest - jnp.max(self.highest, axis=0, keepdims=True))
        total = jnp.maximum(jnp.sum(self.total * weights, axis=0), 1e-30)
        return jnp.sum(self.result * weights[..., None], axis=0) / total[..., None]


def paged_attention_blocks(op: PagedAttentionOp, target: str, rows: int) -> PagedBlocks:
    """Return the block sizes for `rows` query rows on a GPU in `CHIPS`. Values with scales are multiplied in 32 bits."""
    wide = op.scales is not None or op.query.dtype == jnp.float32
    return paged_blocks(target, rows, op.query.shape[-1], wide=wide)


def attend_to_pages(op: PagedAttentionOp, query: jax.Array, table: jax.Array, lengths: jax.Array) -> Parts:
    """Attend to the first `lengths` keys of each request; shapes [R, G, Q, H], int32 [R, M] and int32 [R]."""
    requests, groups, rows, size = query.shape
    kernel_selection: Any = selection.get_active_selection()  # not None: `supports` accepts only known GPUs
    blocks = paged_attention_blocks(op, kernel_selection.target, rows)
    pages_per_block = min(blocks.keys // op.page_size, 1 << (table.shape[1] - 1).bit_length())
    pages_per_block = max(
        pages_per_block, -(-MIN_KEYS // op.page_size)
    )  # the table is padded; keys past a length are hidden
    num_blocks = requests * groups * -(-rows // blocks.rows)
    loops = -(-table.shape[1] // pages_per_block)
    pages_per_split = -(-loops // num_table_parts(kernel_selection.target, num_blocks, loops)) * pages_per_block
    splits = -(-table.shape[1] // pages_per_split)
    table = jnp.pad(jnp.clip(table, 0, op.pages.shape[0] - 1), [(0, 0), (0, splits * pages_per_split - table.shape[1])])
    query = jnp.pad(query, [(0, 0), (0, 0), (0, -rows % blocks.rows), (0, 0)])
    pages = [_head_spec(op, op.pages, i) for i in range(2)]
    scales = [_head_spec(op, op.scales, i) for i in range(2)]
    shape = (splits, *query.shape[:3])
    call = pallas.pallas_call(
        functools.partial(
            compat.paged_attention().paged_attention_kernel,
            num_heads=rows,
            pages_per_compute_block=pages_per_block,
            mask_value=LOW,
            attn_logits_soft_cap=op.softcap,
        ),
        grid=(requests * groups, query.shape[2] // blocks.rows, splits),
        in_specs=[
            pallas.BlockSpec((None, None, blocks.rows, size), lambda i, q, k: (*_request_and_head(i, groups), q, 0)),
            *(spec for pair in zip(pages, scales, strict=True) for spec in pair),
            pallas.BlockSpec((None, pages_per_split), lambda i, q, k: (_request_and_head(i, groups)[0], k)),
            pallas.BlockSpec((1,), lambda i, q, k: _request_and_head(i, groups)[:1]),
        ],
        out_specs=[
            pallas.BlockSpec(
                (None, None, None, blocks.rows, size), lambda i, q, k: (k, *_request_and_head(i, groups), q, 0)
            ),
            *[pallas.BlockSpec((None, None, None, blocks.rows), lambda i, q, k: (k, *_request_and_head(i, groups), q))]
            * 2,
        ],
        out_shape=[jax.ShapeDtypeStruct(shape + end, jnp.float32) for end in ((size,), (), ())],
        compiler_params=compat.triton().CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        name="paged_attention",
    )
    with use_abstract_gpu(kernel_selection.target):
        result, total, highest = call(query, op.pages, op.scales, op.pages, op.scales, table, lengths)
    return Parts(result[..., :rows, :], total[..., :rows], highest[..., :rows])


def _request_and_head(index: Any, groups: int) -> tuple[Any, Any]:
    """Return the request and head of a grid index, whose first axis counts heads within a request."""
    return lax.div(index, jnp.int32(groups)), lax.rem(index, jnp.int32(groups))


def _head_spec(op: PagedAttentionOp, pages: jax.Array | None, index: int) -> Any:
    """Return the block spec for all keys (0) or values (1) of a head, in pages or their scales; None if there are no scales."""
    if pages is None:
        return None
    groups, places = op.groups, pages.shape[0]
    if op.heads_first:
        dims = pages.shape[3:]
        return pallas.BlockSpec(
            (places, None, None, *dims), lambda i, q, k: (0, index, _request_and_head(i, groups)[1], *(0,) * len(dims))
        )
    slots, *dims = pages.shape[1], *pages.shape[3:]
    return pallas.BlockSpec(
        (places, slots, None, *dims),
        lambda i, q, k: (0, 0, 2 * _request_and_head(i, groups)[1] + index, *(0,) * len(dims)),
    )
