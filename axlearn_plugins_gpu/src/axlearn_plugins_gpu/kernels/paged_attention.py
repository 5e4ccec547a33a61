"""The `paged_attention` op, using JAX's GPU kernel (`jax.experimental.pallas.ops.gpu.paged_attention`, in Pallas Triton).

The kernel can mask only the keys after a given length. It therefore processes the keys that all new tokens of a request can
see. XLA processes the few keys at the edges, which a window or the causal order hides from some of the tokens. Each part returns
its largest score and the sum of its weights, which are used to combine the parts (Flash-Decoding, Dao et al., 2023).

Legend: P pages of S slots, R requests of C new tokens and at most M pages, N query heads, G key-value heads, n = N / G, H
head size, Q = n C the queries of a request that share a key-value head, E pages at the edges.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from axlearn_core.contracts.kernels import KernelContext
from axlearn_plugins_gpu import compat
from axlearn_plugins_gpu.chips import CHIPS, unknown_gpu
from axlearn_plugins_gpu.kernels.paged_parts import LOW, Parts, attend_to_pages, paged_attention_blocks
from axlearn_plugins_transformer.kernels.paged_attention import PagedAttentionOp, divides_heads, on_each_device
from axlearn_plugins_transformer.kernels.per_device import count_shards

MAX_CHUNK = 128
"""Maximum number of tokens per chunk, because XLA keeps the scores of all pairs of tokens in memory."""
ADA = (8, 9)
"""First compute capability with float8."""


class _Triton:
    """Paged attention in Pallas Triton; see the module docstring."""

    def supports(self, op: PagedAttentionOp, context: KernelContext) -> str | None:
        """Support static splits, pages without NaN, and head and page sizes that are powers of two."""
        if reason := unknown_gpu(context.target) or compat.missing_paged_attention():
            return reason
        if op.split is None:
            return "the number of tokens of each request is not known at compile time"
        if op.bias is not None:
            return "it does not support a bias on the scores"
        if op.value_size is not None:
            return "it does not support keys and values that share their storage"
        if op.split.chunk > MAX_CHUNK and op.table.shape[0] > op.split.singles:
            return f"a chunk has {op.split.chunk} tokens, more than {MAX_CHUNK}: XLA would score all pairs of them"
        if not op.finite:
            return "unwritten slots may be NaN, which it does not mask"
        if reason := _check_sizes(op, context.target) or _check_dtypes(op, context.target):
            return reason
        return None if divides_heads(op) else "the query heads and key heads are not split over devices the same way"

    def __call__(self, op: PagedAttentionOp) -> jax.Array:
        """Return the attention output, [T, N, H]."""
        return on_each_device(op, _attend)


TRITON = _Triton()


def _check_sizes(op: PagedAttentionOp, target: str) -> str | None:
    size, slots = op.query.shape[-1], op.page_size
    if size not in (16, 32, 64, 128, 256):
        return f"the head size {size} is not a power of two from 16 to 256"
    if slots & (slots - 1):
        return f"a page has {slots} slots, which is not a power of two"
    if slots > (max_keys := paged_attention_blocks(op, target, 1).keys):
        return f"a page has {slots} slots, more than the {max_keys} keys of a block"
    # JAX decides based on the shape of a device's pages, whose third dimension is split.
    numbers = math.prod(op.pages.shape) // count_shards(op.query.shape, (None, "activation_heads", None))[1]
    if numbers >= 2**31 and numbers * op.pages.dtype.itemsize <= 2**32:
        return f"the pages have {numbers} elements, which overflow JAX's signed 32-bit index"
    return None


def _check_dtypes(op: PagedAttentionOp, target: str) -> str | None:
    query, pages = op.dtypes["query"], op.dtypes["pages"]
    if query not in ("bfloat16", "float16", "float32"):
        return f"it needs bfloat16, float16 or float32 queries, got {query}"
    if op.scales is None and query != pages:
        return f"the queries are {query} and the pages {pages}"
    if op.scales is not None and pages not in ("int8", "float8_e4m3fn"):
        return f"it needs int8 or float8_e4m3fn pages when there are scales, got {pages}"
    if pages == "float8_e4m3fn" and CHIPS[target].capability < ADA:
        return f"{target} does not support float8"
    return None


def _attend(op: PagedAttentionOp) -> jax.Array:
    """Return the attention output of one device, [T, N, H]."""
    assert op.split is not None
    singles, chunk = op.split
    heads, size = op.query.shape[1:]
    query = (op.query * op.scale).reshape(-1, op.groups, heads // op.groups, size)
    results = []
    if singles:
        results.append(_attend_rows(op, query[:singles, None], op.table[:singles], op.lengths[:singles]))
    if op.table.shape[0] > singles:
        chunk_queries = query[singles:].reshape(-1, chunk, *query.shape[1:])
        results.append(_attend_rows(op, chunk_queries, op.table[singles:], op.lengths[singles:]))
    results = [x.reshape(-1, heads, size).astype(op.query.dtype) for x in results]
    return results[0] if len(results) == 1 else jnp.concatenate(results)


class _Common(NamedTuple):
    """Range [first, last) of slots that all new tokens of a request can see, for each request.

    Attributes:
        first: int32 [R], first slot of the range, at the start of a page.
        last: int32 [R], end of the range.
        new: Number of new tokens per request, C.
    """

    first: jax.Array
    last: jax.Array
    new: int

    @classmethod
    def from_op(cls, op: PagedAttentionOp, lengths: jax.Array, count: int) -> "_Common":
        """Compute the ranges from causality and from the window, if there is one."""
        first = jnp.zeros_like(lengths)
        if op.window is not None:
            first = -(-jnp.maximum(lengths - op.window, 0) // op.page_size) * op.page_size
        return cls(first, jnp.maximum(lengths - count + 1, first), count)


def _attend_rows(op: PagedAttentionOp, query: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
    """Attend with queries [R, C, G, n, H], table int32 [R, M] and lengths [R]; return float32 [R, C, G, n, H]."""
    _, count, groups, heads, size = query.shape
    rows = jnp.transpose(query, (0, 2, 3, 1, 4)).reshape(-1, groups, heads * count, size)
    common = _Common.from_op(op, lengths, count)
    num_pages = table.shape[1]
    if op.window is not None:
        num_pages = min(num_pages, max(1, -(-(op.window - count + 1) // op.page_size)))
    numbers = common.first[:, None] // op.page_size + jnp.arange(num_pages, dtype=jnp.int32)[None]
    pages = jnp.take_along_axis(table, numbers, axis=1, mode="clip")
    parts = attend_to_pages(op, rows, pages, common.last - common.first)
    edges = _attend_to_edges(op, rows, table, lengths, common)
    result = (parts if edges is None else parts.concatenate(edges)).combine()
    return jnp.transpose(result.reshape(-1, groups, heads, count, size), (0, 3, 1, 2, 4))


def _attend_to_edges(
    op: PagedAttentionOp, query: jax.Array, table: jax.Array, lengths: jax.Array, common: _Common
) -> Parts | None:
    """Attend to the edges with queries [R, G, Q, H]. Return one part, or None if all tokens see the same keys."""
    size, count = op.page_size, common.new
    span = jnp.arange(-(-(count + size - 2) // size), dtype=jnp.int32)[None]
    before = common.first[:, None] // size - 1 - span if op.window is not None else None
    after = common.last[:, None] // size + span if count > 1 else None
    pages = [x for x in (before, after) if x is not None and x.shape[1]]
    if not pages:
        return None
    page = jnp.concatenate(pages, axis=1)
    key, value = op.keys_and_values(jnp.take_along_axis(table, page, axis=1, mode="clip"))  # [R, E, G, S, H]
    slots = page[..., None] * size + jnp.arange(size, dtype=jnp.int32)[None, None]
    slots = slots.reshape(page.shape[0], 1, -1)  # [R, 1, E S]
    positions = (lengths[:, None] - count + jnp.arange(count, dtype=jnp.int32)[None])[..., None]  # [R, C, 1]
    common_slots = (slots >= common.first[:, None, None]) & (slots < common.last[:, None, None])
    visible = (slots >= 0) & (slots <= positions) & ~common_slots
    if op.window is not None:
        visible &= slots > positions - op.window
    visible = jnp.tile(visible, (1, query.shape[2] // count, 1))[:, None]  # [R, 1, Q, E S]
    scores = jnp.einsum("rgqh,regsh->rgqes", query, key, preferred_element_type=jnp.float32)
    scores = scores.reshape(*query.shape[:3], -1)
    if op.softcap is not None:
        scores = op.softcap * jnp.tanh(scores / op.softcap)
    scores = jnp.where(visible, scores, LOW)
    highest = jnp.max(scores, axis=-1)
    weights = jnp.where(visible, jnp.exp(scores - highest[..., None]), 0.0)
    weights_per_page = weights.reshape(*query.shape[:3], -1, size).astype(value.dtype)
    result = jnp.einsum("rgqes,regsh->rgqh", weights_per_page, value, preferred_element_type=jnp.float32)
    return Parts(result[None], jnp.sum(weights, axis=-1)[None], highest[None])
