"""An implementation of `paged_attention` for calls with a static number of new tokens.

Legend: R requests of at most M pages of S slots, C tokens per request, N query heads, G key-value heads, n = N / G, H head
size, V size of a value, W pages (W S keys) per iteration.

Requests with a single token are processed together. Their pages form one list, which a loop reads W pages at a time, so the
time of a step grows with the total number of keys. Requests with a chunk of tokens are processed one by one. Softmaxes are
accumulated online (Milakov & Gimelshein, 2018), and only the keys of the current iteration are copied.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.contracts.kernels import KernelContext
from axlearn_plugins_transformer.kernels.mask_arrays import select_tokens, visible_slots
from axlearn_plugins_transformer.kernels.masks import Mask
from axlearn_plugins_transformer.kernels.paged_attention import LOW, PagedAttentionOp, initial_softmax, on_each_device

FEW_KEYS, MANY_KEYS, CHUNK_KEYS = 512, 1024, 128
"""Keys per iteration (W S): for fewer than `MANY_REQUESTS` single-token requests, for more of them, and for a chunk."""
MANY_REQUESTS = 16


class _XLASplit:
    """Loops over the pages of the requests with an online softmax."""

    def supports(self, op: PagedAttentionOp, context: KernelContext) -> str | None:
        """Support calls with a static split."""
        return None if op.split is not None else "the number of tokens per request is not known at compile time"

    def __call__(self, op: PagedAttentionOp) -> Any:
        """Return the attention output, [T, N, V], and with `log_sum_exp` also float32 [T, N]."""
        result = on_each_device(op, self._attend)
        return (result[..., :-1].astype(op.query.dtype), result[..., -1]) if op.log_sum_exp else result

    def _attend(self, op: PagedAttentionOp) -> jax.Array:
        """Attend on one device and return [T, N, V], or float32 [T, N, V + 1] with `log_sum_exp`; see `_divide`."""
        assert op.split is not None
        singles, chunk = op.split
        heads, size = op.query.shape[1:]
        query = (op.query * op.scale).reshape(-1, op.groups, heads // op.groups, size)
        parts = []
        if singles:
            parts.append(_attend_singles(op, query[:singles]))
        if op.table.shape[0] > singles:
            chunks = query[singles:].reshape(-1, chunk, *query.shape[1:])
            attend = lambda x: _attend_chunk(op, *x)  # noqa: E731
            mask = select_tokens(op.mask, slice(singles, singles + chunks.shape[0] * chunk))
            mask = jax.tree.map(lambda x: jnp.broadcast_to(x, (chunks.shape[0] * chunk, *x.shape[1:])), mask)
            mask = jax.tree.map(lambda x: x.reshape(-1, chunk, *x.shape[1:]), mask)
            parts.append(lax.map(attend, (chunks, op.table[singles:], op.lengths[singles:], mask)))
        results = [x.reshape(-1, heads, x.shape[-1]) for x in parts]
        if not op.log_sum_exp:
            results = [x.astype(op.query.dtype) for x in results]
        return results[0] if len(results) == 1 else jnp.concatenate(results)


def _page_range(op: PagedAttentionOp, lengths: jax.Array, queries: int) -> tuple[jax.Array, jax.Array]:
    """Return the pages that the last `queries` tokens of each request see.

    Returns the index of the first page and the number of pages, int32 [R] each.
    """
    pages = jnp.clip(-(-lengths // op.page_size), 0, op.table.shape[1])
    first = op.mask.first_slot(lengths - queries)
    if first is None:
        return jnp.zeros_like(pages), pages
    first = first // op.page_size
    return first, pages - first


def _mask_scores(
    op: PagedAttentionOp, mask: Mask, scores: jax.Array, positions: jax.Array, slots: jax.Array, lengths: Any = None
) -> jax.Array:
    """Apply cap, bias and mask to the scores [B, G, n, C, K].

    Args:
        op: The op.
        mask: Mask for the queries; see `visible_slots`.
        scores: [B, G, n, C, K].
        positions: Positions of the queries, int32 [B, C].
        slots: Slots of the keys, int32 [B, K].
        lengths: Number of written slots; see `visible_slots`.
    """
    scores = scores.astype(jnp.float32)
    if op.softcap is not None:
        scores = op.softcap * jnp.tanh(scores / op.softcap)
    if op.bias is not None:
        counts = (0, positions.shape[1]), (0, slots.shape[1])
        bias = op.bias.materialize(*counts, positions, slots)
        scores = scores + bias.reshape(bias.shape[0], *scores.shape[1:])
    visible = visible_slots(mask, positions, slots, lengths)
    return jnp.where(visible[:, None, None], scores, LOW)


def _attend_singles(op: PagedAttentionOp, query: jax.Array) -> jax.Array:
    """Attend with one token per request: [R, G, n, H] -> [R, G, n, V], as `_divide` returns them."""
    rows, groups, heads, _ = query.shape
    size, lengths, table = op.page_size, op.lengths[:rows], op.table[:rows]
    keys = FEW_KEYS if rows < MANY_REQUESTS else MANY_KEYS
    num_pages = max(1, min(keys // size, rows * table.shape[1]))
    first, counts = _page_range(op, lengths, 1)
    ends = jnp.cumsum(counts)

    def body(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        highest, total, result = state
        item = index * num_pages + jnp.arange(num_pages, dtype=jnp.int32)
        owner = jnp.sum(ends[None] <= item[:, None], axis=1, dtype=jnp.int32)
        real, owner = owner < rows, jnp.minimum(owner, rows - 1)
        page = first[owner] + item - (ends[owner] - counts[owner])
        key, value = op.keys_and_values(table[owner, jnp.where(real, page, 0)])
        slots = page[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]
        scores = jnp.einsum("wgnh,wgsh->wgns", query[owner], key)[:, :, :, None]
        positions = jnp.where(real, lengths[owner] - 1, -1)[:, None]
        mask = select_tokens(op.mask, owner)
        scores = _mask_scores(op, mask, scores, positions, slots)[:, :, :, 0]
        high = jnp.max(scores, axis=-1)
        owned = (owner[None] == jnp.arange(rows, dtype=jnp.int32)[:, None]) & real[None]
        peak = jnp.max(jnp.where(owned[:, :, None, None], high[None], LOW), axis=1)
        peak = jnp.maximum(highest, peak)
        scale = jnp.exp(highest - peak)
        weights = jnp.where(scores > LOW, jnp.exp(scores - peak[owner][..., None]), 0.0)
        if not op.finite:  # unwritten slots may contain NaN
            value = jnp.where((slots <= positions)[:, None, :, None], value, 0)
        part = jnp.einsum("wgns,wgsv->wgnv", weights.astype(value.dtype), value).astype(jnp.float32)
        owned = owned.astype(jnp.float32)
        total = total * scale + jnp.einsum("rw,wgn->rgn", owned, jnp.sum(weights, axis=-1))
        result = result * scale[..., None] + jnp.einsum("rw,wgnv->rgnv", owned, part)
        return peak, total, result

    value_size = op.value_size or op.pages.shape[-1]
    shape = (rows, groups, heads)
    sinks = None if op.sinks is None else op.sinks.reshape(groups, heads)
    state = *initial_softmax(shape, sinks), jnp.zeros((*shape, value_size), jnp.float32)
    return _divide(op, *lax.fori_loop(0, -(-ends[-1] // num_pages), body, state))


def _attend_chunk(op: PagedAttentionOp, query: jax.Array, table: jax.Array, length: jax.Array, mask: Mask) -> jax.Array:
    """Attend with a chunk of tokens of one request.

    Maps [C, G, n, H], int32 [M], int32 [] and a mask for C rows to [C, G, n, V], as `_divide` returns them.
    """
    count, groups, heads, _ = query.shape
    size = op.page_size
    num_pages = max(1, min(CHUNK_KEYS // size, table.shape[0]))
    first, pages = (x[0] for x in _page_range(op, length[None], count))
    positions = (length - count + jnp.arange(count, dtype=jnp.int32))[None]
    rows = jnp.transpose(query, (1, 2, 0, 3)).reshape(groups, heads * count, -1)

    def body(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        highest, total, result = state
        page = first + index * num_pages + jnp.arange(num_pages, dtype=jnp.int32)
        key, value = op.keys_and_values(table.at[page].get(mode="clip"))
        key, value = (jnp.swapaxes(x, 0, 1).reshape(groups, -1, x.shape[-1]) for x in (key, value))
        slots = (page[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]).reshape(1, -1)
        scores = jnp.einsum("gqh,gsh->gqs", rows, key).reshape(1, groups, heads, count, -1)
        scores = _mask_scores(op, mask, scores, positions, slots, length).reshape(groups, heads * count, -1)
        peak = jnp.maximum(highest, jnp.max(scores, axis=-1))
        scale = jnp.exp(highest - peak)
        weights = jnp.where(scores > LOW, jnp.exp(scores - peak[..., None]), 0.0)
        if not op.finite:
            value = jnp.where((slots[0] < length)[None, :, None], value, 0)
        part = jnp.einsum("gqs,gsv->gqv", weights.astype(value.dtype), value).astype(jnp.float32)
        return peak, total * scale + jnp.sum(weights, axis=-1), result * scale[..., None] + part

    shape = (groups, heads * count)
    sinks = None if op.sinks is None else jnp.repeat(op.sinks.reshape(groups, heads), count, axis=1)
    state = *initial_softmax(shape, sinks), jnp.zeros((*shape, op.value_size or op.pages.shape[-1]), jnp.float32)
    result = _divide(op, *lax.fori_loop(0, -(-pages // num_pages), body, state))
    return jnp.transpose(result.reshape(groups, heads, count, -1), (2, 0, 1, 3))


def _divide(op: PagedAttentionOp, highest: jax.Array, total: jax.Array, result: jax.Array) -> jax.Array:
    """Divide the sums of an online softmax, [..., V], by its denominator. With `log_sum_exp`, append its logarithm."""
    total = jnp.maximum(total, 1e-30)
    result = result / total[..., None]
    return jnp.concatenate([result, (highest + jnp.log(total))[..., None]], axis=-1) if op.log_sum_exp else result


XLA_SPLIT = _XLASplit()
