"""Attention of some tiles of queries over some chunks of keys, with a running softmax, and its derivative.

b rows, G key-value heads, R query heads of each (N = G * R), H head size, V size of the values; t queries of a tile, c keys
of a chunk. Queries and keys are wherever in the sequence their slots say; what a mask hides altogether is skipped at run time
(Rabe & Staats, 2021; Dao et al., 2022).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.errors import RequestError
from axlearn_plugins_transformer.kernels import masks
from axlearn_plugins_transformer.kernels.attention import AttentionOp

HIDDEN = -1e30


class Tiles(NamedTuple):
    """Queries, and what is known of them.

    Attributes:
        query: [tiles, b, t, G, R, H].
        start: int32 [tiles], the slot of the first query of each tile.
        arrays: what masks know of each query, int32 [tiles, b, t].
    """

    query: jax.Array
    start: jax.Array
    arrays: tuple[jax.Array, ...] = ()


class Chunks(NamedTuple):
    """Keys and values.

    Attributes:
        key: [chunks, b, c, G, H].
        value: [chunks, b, c, G, V].
        start: int32 [chunks], the slot of the first key of each chunk.
        arrays: what masks know of each key, int32 [chunks, b, c].
    """

    key: jax.Array
    value: jax.Array
    start: jax.Array
    arrays: tuple[jax.Array, ...] = ()


class Sums(NamedTuple):
    """A softmax that is not finished: float32 [tiles, b, G, R, t, V] weighted values, [tiles, b, G, R, t] of the rest."""

    values: jax.Array
    weight: jax.Array
    top: jax.Array

    @classmethod
    def empty(cls, tiles: Tiles, width: int) -> "Sums":
        """Of no keys."""
        n, b, t, groups, repeats, _ = tiles.query.shape
        shape = (n, b, groups, repeats, t)
        return cls(jnp.zeros((*shape, width)), jnp.zeros(shape), jnp.full(shape, HIDDEN))

    def finished(self) -> tuple[jax.Array, jax.Array]:
        """The outputs, and the logarithm of the sum of the exponentials; zeros for queries that see nothing."""
        weight = jnp.where(self.weight > 0, self.weight, 1.0)
        return self.values / weight[..., None], self.top + jnp.log(weight)


class Scores:
    """How scores come of queries and keys, and which keys a query sees."""

    def __init__(self, op: AttentionOp, heads: Any = None):
        """Of an op, without its operands.

        Args:
            op: its mask, scale, soft cap and bias.
            heads: (mesh axes that the query heads are split over, how many are here); None means that all are here.
        """
        self.parts, self.tree = jax.tree.flatten(op.mask)
        self.roles = jax.tree.leaves(_roles(op.mask))
        self.mask, self.scale, self.softcap, self.bias, self.heads = op.mask, op.scale, op.softcap, op.bias, heads

    def of_role(self, role: str) -> tuple[jax.Array, ...]:
        """The arrays of the mask that tell of `queries`, `keys` or `rows`."""
        return tuple(a for a, r in zip(self.parts, self.roles, strict=True) if r == role)

    def may_see(self, query: jax.Array, queries: int, key: jax.Array, keys: int) -> jax.Array:
        """Whether any of `queries` queries from a slot on may see any of the keys; bool scalar."""
        return _may_see(self.mask, (query, query + queries - 1), (key, key + keys - 1))

    def raw(self, query: jax.Array, key: jax.Array, query_slots: jax.Array, key_slots: jax.Array) -> jax.Array:
        """float32 [b, G, R, t, c], before the mask."""
        scores = jnp.einsum("btgrh,bcgh->bgrtc", query, key, preferred_element_type=jnp.float32) * self.scale
        if self.softcap is not None:
            scores = self.softcap * jnp.tanh(scores / self.softcap)
        if self.bias is not None:
            whole = ((0, query.shape[1]), (0, key.shape[1]))
            added = self.bias.materialize(*whole, query_slots, key_slots)
            if self.heads is not None:
                axes, count = self.heads
                added = lax.dynamic_slice_in_dim(added, lax.axis_index(axes) * count, count, axis=1)
            scores = scores + added.reshape(added.shape[0], *scores.shape[1:3], *added.shape[2:])
        return scores

    def visible(self, query: Any, key: Any, rows: tuple[jax.Array, ...], sizes: tuple[int, int]) -> jax.Array:
        """bool [b or 1, 1, 1, t, c]; `query` and `key` are (slots, arrays)."""
        arrays = {"queries": iter(query[1]), "keys": iter(key[1]), "rows": iter(rows)}
        mask = self.tree.unflatten([next(arrays[role]) for role in self.roles])
        return mask.materialize((0, sizes[0]), (0, sizes[1]), query[0], key[0])[:, None, None]


def _roles(mask: masks.Mask) -> Any:
    """The mask with, in the place of each array, what it tells of."""
    kind: Any = type(mask)
    if isinstance(mask, masks.Segments):
        return kind("queries", "keys")
    if isinstance(mask, masks.Prefix):
        return kind("rows")
    if isinstance(mask, (masks.And, masks.Or)):
        return kind(tuple(map(_roles, _parts(mask))))
    if jax.tree.leaves(mask):
        raise RequestError(
            f"a sequence that is split over devices does not go with the mask {mask.describe()!r}: nothing says which of "
            "its arrays belong to queries, and which to keys\n    fix: use causal, window, prefix and segment masks"
        )
    return mask


def _parts(mask: Any) -> tuple[masks.Mask, ...]:
    return mask.masks


def _may_see(mask: Any, queries: Any, keys: Any) -> jax.Array:
    if isinstance(mask, masks.Causal):
        return keys[0] <= queries[1]
    if isinstance(mask, masks.SlidingWindow):
        return keys[1] > queries[0] - mask.size  # type: ignore[attr-defined]
    if isinstance(mask, (masks.And, masks.Or)):
        parts = jnp.stack([_may_see(m, queries, keys) for m in _parts(mask)])
        return jnp.any(parts) if isinstance(mask, masks.Or) else jnp.all(parts)
    return jnp.asarray(True)


def _slots(start: jax.Array, count: int) -> jax.Array:
    return (start + jnp.arange(count, dtype=jnp.int32))[None]


def _pairs(tiles: Tiles, chunks: Chunks, scores: Scores, rows: tuple[jax.Array, ...]) -> Callable[..., Any]:
    """(tile, chunk) -> whether it shows anything, a function to what it shows, and one of query and key to the scores."""
    sizes = tiles.query.shape[2], chunks.key.shape[2]

    def of(tile: Tiles, chunk: Chunks) -> Any:
        queries, keys = _slots(tile.start, sizes[0]), _slots(chunk.start, sizes[1])
        any_visible = scores.may_see(tile.start, sizes[0], chunk.start, sizes[1])
        visible = lambda: scores.visible((queries, tile.arrays), (keys, chunk.arrays), rows, sizes)  # noqa: E731
        return any_visible, visible, lambda q, k: scores.raw(q, k, queries, keys)

    return of


def add(tiles: Tiles, chunks: Chunks, scores: Scores, rows: tuple[jax.Array, ...], sums: Sums) -> Sums:
    """The sums with these keys added to them."""
    pair = _pairs(tiles, chunks, scores, rows)

    def tile_step(_: None, pair_of_tile: tuple[Tiles, Sums]) -> tuple[None, Sums]:
        tile, old = pair_of_tile

        def chunk_step(old: Sums, chunk: Chunks) -> tuple[Sums, None]:
            any_visible, visible, raw = pair(tile, chunk)

            def added(old: Sums) -> Sums:
                mask = visible()
                scores_here = jnp.where(mask, raw(tile.query, chunk.key), HIDDEN)
                top = jnp.maximum(old.top, jnp.max(scores_here, axis=-1))
                weights = jnp.where(mask, jnp.exp(scores_here - top[..., None]), 0.0)
                shrink = jnp.exp(old.top - top)
                values = jnp.einsum(
                    "bgrtc,bcgv->bgrtv",
                    weights.astype(chunk.value.dtype),
                    chunk.value,
                    preferred_element_type=jnp.float32,
                )
                return Sums(
                    old.values * shrink[..., None] + values, old.weight * shrink + jnp.sum(weights, axis=-1), top
                )

            return lax.cond(any_visible, added, lambda old: old, old), None

        return None, lax.scan(chunk_step, old, chunks)[0]

    return lax.scan(tile_step, None, (tiles, sums))[1]


class Kept(NamedTuple):
    """What the derivative needs of the queries: [tiles, b, G, R, t, V] and [tiles, b, G, R, t], float32.

    Attributes:
        grads: of the outputs.
        log_sum: the logarithm of the sum of the exponentials of all scores.
        inner: the product of each output and its gradient.
    """

    grads: jax.Array
    log_sum: jax.Array
    inner: jax.Array


def gradients(
    tiles: Tiles, chunks: Chunks, scores: Scores, rows: tuple[jax.Array, ...], residuals: Kept
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The parts of the gradients by query, key and value, float32 in their shapes, that these keys make up."""
    pair = _pairs(tiles, chunks, scores, rows)

    def tile_step(totals: Any, pair_of_tile: tuple[Tiles, Kept]) -> Any:
        tile, residual = pair_of_tile

        def chunk_step(by_query: jax.Array, chunk: Chunks) -> Any:
            any_visible, visible, raw = pair(tile, chunk)

            def compute() -> Any:
                logits, pull = jax.vjp(raw, tile.query, chunk.key)
                weights = jnp.where(visible(), jnp.exp(logits - residual.log_sum[..., None]), 0.0)
                by_value = jnp.einsum("bgrtc,bgrtv->bcgv", weights, residual.grads)
                value = chunk.value.astype(jnp.float32)
                by_weight = jnp.einsum("bgrtv,bcgv->bgrtc", residual.grads, value)
                by_query, by_key = pull(weights * (by_weight - residual.inner[..., None]))
                return tuple(x.astype(jnp.float32) for x in (by_query, by_key, by_value))

            shapes = tile.query.shape, chunk.key.shape, chunk.value.shape
            more, *by_chunk = lax.cond(any_visible, compute, lambda: tuple(jnp.zeros(s, jnp.float32) for s in shapes))
            return by_query + more, by_chunk

        by_query, by_chunks = lax.scan(chunk_step, jnp.zeros(tile.query.shape, jnp.float32), chunks)
        return [a + b for a, b in zip(totals, by_chunks, strict=True)], by_query

    zeros = [jnp.zeros(x.shape, jnp.float32) for x in (chunks.key, chunks.value)]
    (by_key, by_value), by_query = lax.scan(tile_step, zeros, (tiles, residuals))
    return by_query, by_key, by_value
