"""Batch-invariant attention.

The result for a row is bitwise independent of all other rows. The kernels are for training and serving.

Each query is in a tile of `ROWS` rows. A loop multiplies the tile by the keys of its request in blocks of `KEYS`, starting
at slot 0. All sums therefore follow the order of the slots, regardless of the batch, the chunks of a prompt and the pages
of a cache. Both kernels run the same loop. A block that is hidden from a query does not change the query's sums.

The kernels call separate ops, so a plugin can implement both ops with a different order of summation. It must use the same
order for both. Its kernels decide from the `traits` of an op whether they support it. Both ops of a model have equal traits, so
training and serving use the same order.

A program that uses one of these kernels is compiled so that the rest of it does not depend on the number of rows either
(see `hooks.py`).

Legend: B batch, Q queries, C tokens of a tile, N query heads, G key-value heads, n = N / G, H head size, V size of a value.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.contracts.kernels import KernelContext
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.mask_arrays import map_arrays, select_tokens, visible_slots
from axlearn_plugins_transformer.kernels.masks import Mask, is_causal_window, window_size
from axlearn_plugins_transformer.kernels.paged_attention import LOW, PagedAttentionOp, initial_softmax, on_each_device

ROWS = 32
"""Minimum number of rows in a matmul. XLA on CPUs multiplies 16 rows or fewer with a different algorithm."""
KEYS = 128
TILE_BATCH = 8
"""Number of tiles that are computed together."""

Block = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""Index of a block -> its keys [G, KEYS, H] and values [G, KEYS, V]."""


def tile_tokens(heads: int) -> int:
    """Return the number of tokens in a tile (C), for `heads` query heads per key-value head."""
    return max(1, ROWS // heads)


def _attend_tile(
    op: Any, mask: Mask, query: jax.Array, positions: jax.Array, length: Any, blocks: Any, block: Block
) -> jax.Array:
    """Attend with the queries of a tile, [C, G, n, H] -> float32 [C, G, n, V].

    Args:
        op: The op.
        mask: Mask for C rows of one query.
        query: [C, G, n, H].
        positions: Positions of the queries, int32 [C].
        length: Number of keys.
        blocks: Number of blocks to read.
        block: Returns the keys and values of a block.
    """
    count, groups, heads, size = query.shape
    rows = jnp.transpose(query, (1, 2, 0, 3)).reshape(groups, heads * count, size)
    rows = jnp.pad(rows, ((0, 0), (0, max(0, ROWS - heads * count)), (0, 0)))

    def body(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        highest, total, result = state
        key, value = block(index)
        slots = index * KEYS + jnp.arange(KEYS, dtype=jnp.int32)
        scores = jnp.einsum("gqh,gsh->gqs", rows, key).astype(jnp.float32)
        if op.softcap is not None:
            scores = op.softcap * jnp.tanh(scores / op.softcap)
        visible = visible_slots(mask, positions, slots, length)
        if op.bias is not None:
            bias = op.bias.materialize((0, count), (0, KEYS), positions[None], slots[None])
            bias = bias.reshape(groups, heads * count, KEYS)
            scores = scores + jnp.pad(bias, ((0, 0), (0, scores.shape[1] - heads * count), (0, 0)))
        visible = jnp.broadcast_to(visible[None, None], (1, heads, count, KEYS)).reshape(1, heads * count, KEYS)
        visible = jnp.pad(visible, ((0, 0), (0, scores.shape[1] - heads * count), (0, 0)))
        scores = jnp.where(visible, scores, LOW)
        peak = jnp.maximum(highest, jnp.max(scores, axis=-1))
        scale = jnp.exp(highest - peak)
        weights = jnp.where(scores > LOW, jnp.exp(scores - peak[..., None]), 0.0)
        if not (isinstance(op, PagedAttentionOp) and op.finite):  # unwritten slots may contain NaN
            value = jnp.where((slots < length)[None, :, None], value, 0)
        part = jnp.einsum("gqs,gsv->gqv", weights.astype(value.dtype), value).astype(jnp.float32)
        return peak, total * scale + jnp.sum(weights, axis=-1), result * scale[..., None] + part

    values = jax.eval_shape(block, jnp.int32(0))[1].shape[-1]
    sinks = None
    if op.sinks is not None:
        sinks = jnp.repeat(op.sinks.reshape(groups, heads), count, axis=1)
        sinks = jnp.pad(sinks, ((0, 0), (0, rows.shape[1] - heads * count)))
    state = *initial_softmax(rows.shape[:2], sinks), jnp.zeros((*rows.shape[:2], values), jnp.float32)
    _, total, result = lax.fori_loop(0, blocks, body, state)
    result = result / jnp.maximum(total, 1e-30)[..., None]
    return jnp.transpose(result[:, : heads * count].reshape(groups, heads, count, -1), (2, 0, 1, 3))


def _split_tiles(x: jax.Array, count: int) -> jax.Array:
    """Split [Q, ...] into [tiles, count, ...] with padding."""
    x = jnp.pad(x, [(0, -x.shape[0] % count)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(-1, count, *x.shape[1:])


class Traits(NamedTuple):
    """Properties that both ops of a model's layer share.

    Attributes:
        size: Head size.
        value_size: Size of a value.
        dtypes: Dtypes of queries, keys and values. Pages store values in the dtype of keys.
        biased: Whether the scores have a bias.
    """

    size: int
    value_size: int
    dtypes: tuple[str, str, str]
    biased: bool


def traits(op: AttentionOp | PagedAttentionOp) -> Traits:
    """Return the traits of a call.

    The call can be to either op, or to the op that the `invariant` kernel computes.
    """
    size, query, biased = op.query.shape[-1], str(op.query.dtype), op.bias is not None
    if isinstance(op, AttentionOp):
        return Traits(size, op.value.shape[-1], (query, str(op.key.dtype), str(op.value.dtype)), biased)
    pages = str(op.pages.dtype)
    return Traits(size, op.value_size or size, (query, pages, pages), biased)


@attrs.frozen(eq=False)
class InvariantAttentionOp(AttentionOp):
    """Batch-invariant `AttentionOp`.

    Positions are aligned.
    """

    name = "invariant_attention"

    @property
    def window(self) -> int | None:
        """Number of most recent keys that a query sees, or None for all."""
        return window_size(self.mask)

    def extras(self) -> tuple[str, ...]:
        """Return the extras of the op, and `mask` as in `PagedAttentionOp`, so that both ops use equal kernels."""
        return super().extras() if is_causal_window(self.mask) else (*super().extras(), "mask")

    def reference(self) -> jax.Array:
        """Compute [B, Q, N, V] one tile at a time."""
        return _attend_rows(self)


@attrs.frozen(eq=False)
class InvariantPagedAttentionOp(PagedAttentionOp):
    """`PagedAttentionOp` with a static split, in a batch-invariant order."""

    name = "invariant_paged_attention"

    def bytes(self) -> float:
        """Count all operands except those that the split replaces."""
        return super().bytes() - sum(x.size * x.dtype.itemsize for x in (self.starts, self.count))

    def reference(self) -> jax.Array:
        """Compute [T, N, V] one tile at a time. Each device attends with its own heads."""
        return on_each_device(self, _attend_pages)


def _convert(op_class: type[Any], op: Any) -> Any:
    return op_class(**attrs.asdict(op, recurse=False))


class _Invariant:
    """The batch-invariant kernel of the `attention` op."""

    def supports(self, op: AttentionOp, context: KernelContext) -> str | None:
        """Support self-attention."""
        return None if op.aligned else "queries and keys are not the same positions"

    def __call__(self, op: AttentionOp) -> jax.Array:
        """Return the attention output, [B, Q, N, V]."""
        return _convert(InvariantAttentionOp, op).run()


def _attend_rows(op: InvariantAttentionOp) -> jax.Array:
    """Compute [B, Q, N, V] row by row."""
    batch, length, heads, size = op.query.shape
    groups = op.key.shape[2]
    count = tile_tokens(heads // groups)
    query = (op.query * op.scale).reshape(batch, length, groups, heads // groups, size)
    positions = jnp.arange(-(-length // count) * count, dtype=jnp.int32).reshape(-1, count)
    mask = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:])), op.mask)

    def row(x: tuple[Any, ...]) -> jax.Array:
        query, key, value, mask = x
        keys, values = (jnp.swapaxes(jnp.pad(y, ((0, -length % KEYS), (0, 0), (0, 0))), 0, 1) for y in (key, value))

        def block(index: jax.Array) -> tuple[jax.Array, jax.Array]:
            return tuple(lax.dynamic_slice_in_dim(y, index * KEYS, KEYS, axis=1) for y in (keys, values))  # type: ignore[return-value]

        def split(role: str, x: jax.Array) -> jax.Array:
            return _split_tiles(x, count) if role == "queries" else jnp.broadcast_to(x, (positions.shape[0], *x.shape))

        def tile(x: tuple[jax.Array, jax.Array, Mask]) -> jax.Array:
            query, positions, mask = x
            mask = map_arrays(mask, lambda role, x: x[:, None] if role == "queries" else x[None])
            # Loop over all blocks, although later ones are hidden, because only a loop of static length has a backward pass.
            return _attend_tile(op, mask, query, positions, length, -(-length // KEYS), block)

        result = lax.map(tile, (_split_tiles(query, count), positions, map_arrays(mask, split)))
        return result.reshape(-1, *result.shape[2:])[:length]

    result = lax.map(row, (query, op.key, op.value, mask))
    return result.reshape(batch, length, heads, -1).astype(op.value.dtype)


class _InvariantPaged:
    """The batch-invariant kernel of the `paged_attention` op."""

    def supports(self, op: PagedAttentionOp, context: KernelContext) -> str | None:
        """Support calls with a static split and a page size that divides the block size."""
        if op.split is None:
            return "the number of tokens per request is not known at compile time"
        return (
            None if KEYS % op.page_size == 0 else f"the page size {op.page_size} does not divide the block size {KEYS}"
        )

    def __call__(self, op: PagedAttentionOp) -> jax.Array:
        """Return the attention output, [T, N, V]."""
        return _convert(InvariantPagedAttentionOp, op).run()


def _attend_pages(op: PagedAttentionOp) -> jax.Array:
    """Compute [T, N, V] on one device."""
    assert op.split is not None
    singles, chunk = op.split
    heads, size = op.query.shape[1:]
    groups = op.groups
    query = (op.query * op.scale).reshape(-1, groups, heads // groups, size)
    total = singles + chunk * (op.table.shape[0] - singles)
    unused, query = query.shape[0] - total, query[:total]
    pages = KEYS // op.page_size
    table = jnp.pad(op.table, ((0, 0), (0, -op.table.shape[1] % pages)))

    def tile(x: tuple[Any, ...]) -> jax.Array:
        query, positions, request, mask = x
        row = table[request]

        def block(index: jax.Array) -> tuple[jax.Array, jax.Array]:
            numbers = lax.dynamic_slice_in_dim(row, index * pages, pages)
            key, value = op.keys_and_values(numbers)
            return tuple(jnp.swapaxes(y, 0, 1).reshape(groups, KEYS, -1) for y in (key, value))  # type: ignore[return-value]

        length = op.lengths[request]
        last = length - 1 if op.mask.lookahead() else jnp.minimum(positions[-1], length - 1)
        blocks = jnp.clip((last // KEYS) + 1, 0, table.shape[1] // pages)
        return _attend_tile(op, mask, query, positions, length, blocks, block)

    parts = []
    if singles:
        requests = jnp.arange(singles, dtype=jnp.int32)
        mask = jax.tree.map(lambda x: x[:, None], _broadcast(op.mask, slice(0, singles), singles))
        tiles = query[:singles, None], op.lengths[:singles, None] - 1, requests, mask
        parts.append(lax.map(tile, tiles, batch_size=min(singles, TILE_BATCH)))
    if op.table.shape[0] > singles:
        parts.append(_attend_chunks(op, query[singles:].reshape(-1, chunk, *query.shape[1:]), tile))
    results = [x.reshape(-1, heads, x.shape[-1]).astype(op.query.dtype) for x in parts]
    if unused:
        results.append(jnp.zeros((unused, *results[0].shape[1:]), results[0].dtype))
    return results[0] if len(results) == 1 else jnp.concatenate(results)


def _attend_chunks(op: PagedAttentionOp, query: jax.Array, tile: Callable[[Any], jax.Array]) -> jax.Array:
    """Attend with the chunks of K requests: [K, C, G, n, H] -> [K, C, G, n, V]."""
    num_chunks, chunk = query.shape[:2]
    singles = op.split.singles if op.split else 0
    count = tile_tokens(query.shape[3])
    tiles = jax.vmap(lambda x: _split_tiles(x, count))(query)
    num_tiles = tiles.shape[1]
    begin = op.lengths[singles:, None, None] - chunk
    positions = begin + jnp.arange(num_tiles * count, dtype=jnp.int32).reshape(1, num_tiles, count)
    requests = jnp.repeat(jnp.arange(singles, singles + num_chunks, dtype=jnp.int32), num_tiles)
    mask = _broadcast(op.mask, slice(singles, singles + num_chunks * chunk), num_chunks * chunk)
    mask = jax.tree.map(lambda x: jax.vmap(lambda y: _split_tiles(y, count))(x.reshape(-1, chunk, *x.shape[1:])), mask)
    mask = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), mask)
    parts = tiles.reshape(-1, *tiles.shape[2:]), positions.reshape(-1, count), requests, mask
    result = lax.map(tile, parts, batch_size=min(requests.shape[0], TILE_BATCH))
    return result.reshape(num_chunks, num_tiles * count, *result.shape[2:])[:, :chunk]


def _broadcast(mask: Mask, tokens: slice, count: int) -> Mask:
    """Return the mask for `count` tokens, with separate arrays for each."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape[1:])), select_tokens(mask, tokens))


INVARIANT, INVARIANT_PAGED = _Invariant(), _InvariantPaged()
