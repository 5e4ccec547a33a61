"""Attention to the first keys of requests, in pages: the call of JAX's kernel for GPUs.

The library calls it with keys and values in two arrays, one head after the other. The pages of the op have both side by side: a
slice of them would be a copy of the cache. So the call is this module's, and what a block computes is the library's.

Legend: see `paged_attention`; K parts of a table.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas

from axlearn_core.kernels import selection
from axlearn_plugins_gpu import compat
from axlearn_plugins_gpu.kernels.blocks import PagedBlocks, paged, parts_of_table
from axlearn_plugins_gpu.kernels.named_gpu import named
from axlearn_plugins_transformer.kernels.paged_attention import PagedAttentionOp

LOW = -1e30
"""The score of a hidden key."""


LEAST_KEYS = 16
"""Of a block: Triton adds up the products of fewer several times, to fill an instruction of tensor cores."""


class Parts(NamedTuple):
    """What attention to parts of the keys gives, float32.

    Attributes:
        result: [K, R, G, Q, H], the sums of values, each times its weight.
        total: [K, R, G, Q], the sums of weights, which are relative to the part's largest score.
        highest: [K, R, G, Q], the largest scores; very low where a part has no keys.
    """

    result: jax.Array
    total: jax.Array
    highest: jax.Array

    def beside(self, other: "Parts") -> "Parts":
        """All parts of both."""
        return Parts(*(jnp.concatenate(pair) for pair in zip(self, other, strict=True)))

    def added_up(self) -> jax.Array:
        """[R, G, Q, H], the attention to all keys."""
        weights = jnp.exp(self.highest - jnp.max(self.highest, axis=0, keepdims=True))
        total = jnp.maximum(jnp.sum(self.total * weights, axis=0), 1e-30)
        return jnp.sum(self.result * weights[..., None], axis=0) / total[..., None]


def blocks_of(op: PagedAttentionOp, target: str, rows: int) -> PagedBlocks:
    """For so many rows of queries on a GPU that `CHIPS` knows; values with scales are multiplied in 32 bits."""
    wide = op.scales is not None or op.query.dtype == jnp.float32
    return paged(target, rows, op.query.shape[-1], wide=wide)


def attend_to_pages(op: PagedAttentionOp, query: jax.Array, table: jax.Array, lengths: jax.Array) -> Parts:
    """[R, G, Q, H], int32 [R, M] and [R] -> attention to the first `lengths` keys of each request."""
    requests, groups, rows, size = query.shape
    kernel_selection: Any = selection.in_force()  # `supports` has said that its GPU is known
    blocks = blocks_of(op, kernel_selection.target, rows)
    at_once = min(blocks.keys // op.page_size, 1 << (table.shape[1] - 1).bit_length())
    at_once = max(at_once, -(-LEAST_KEYS // op.page_size))  # the table is padded, and what is behind a length is hidden
    launched = requests * groups * -(-rows // blocks.rows)
    loops = -(-table.shape[1] // at_once)
    each = -(-loops // parts_of_table(kernel_selection.target, launched, loops)) * at_once
    splits = -(-table.shape[1] // each)
    table = jnp.pad(jnp.clip(table, 0, op.pages.shape[0] - 1), [(0, 0), (0, splits * each - table.shape[1])])
    query = jnp.pad(query, [(0, 0), (0, 0), (0, -rows % blocks.rows), (0, 0)])
    pages = [_spec_of_head(op, op.pages, i) for i in range(2)]
    scales = [_spec_of_head(op, op.scales, i) for i in range(2)]
    shape = (splits, *query.shape[:3])
    call = pallas.pallas_call(
        functools.partial(
            compat.paged_attention().paged_attention_kernel,
            num_heads=rows,
            pages_per_compute_block=at_once,
            mask_value=LOW,
            attn_logits_soft_cap=op.softcap,
        ),
        grid=(requests * groups, query.shape[2] // blocks.rows, splits),
        in_specs=[
            pallas.BlockSpec((None, None, blocks.rows, size), lambda i, q, k: (*_request_and_head(i, groups), q, 0)),
            *(spec for pair in zip(pages, scales, strict=True) for spec in pair),
            pallas.BlockSpec((None, each), lambda i, q, k: (_request_and_head(i, groups)[0], k)),
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
    with named(kernel_selection.target):
        result, total, highest = call(query, op.pages, op.scales, op.pages, op.scales, table, lengths)
    return Parts(result[..., :rows, :], total[..., :rows], highest[..., :rows])


def _request_and_head(index: Any, groups: int) -> tuple[Any, Any]:
    """Of a block of the grid, whose first axis counts heads of one request after another."""
    return lax.div(index, jnp.int32(groups)), lax.rem(index, jnp.int32(groups))


def _spec_of_head(op: PagedAttentionOp, pages: jax.Array | None, which: int) -> Any:
    """All keys (0) or all values (1) of a block's head, of the pages or of their scales; None where there are none."""
    if pages is None:
        return None
    groups, places = op.groups, pages.shape[0]
    if op.heads_first:
        rest = pages.shape[3:]
        return pallas.BlockSpec(
            (places, None, None, *rest), lambda i, q, k: (0, which, _request_and_head(i, groups)[1], *(0,) * len(rest))
        )
    slots, *rest = pages.shape[1], *pages.shape[3:]
    return pallas.BlockSpec(
        (places, slots, None, *rest),
        lambda i, q, k: (0, 0, 2 * _request_and_head(i, groups)[1] + which, *(0,) * len(rest)),
    )
