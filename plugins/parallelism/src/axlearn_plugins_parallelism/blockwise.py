"""Blockwise attention with a running softmax, and its gradients.

Shapes: b rows, G key-value heads, R query heads per key-value head (N = G * R), H head size, V value size, t queries per tile,
c keys per chunk. A slot is the position of a query or key in the sequence. If the mask hides a chunk from a tile completely,
the pair is skipped at run time (Rabe & Staats, 2021; Dao et al., 2022).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from axlearn_plugins_transformer.kernels import masks
from axlearn_plugins_transformer.kernels.attention import AttentionOp

HIDDEN = -1e30


class QueryTiles(NamedTuple):
    """Tiles of queries.

    Attributes:
        query: Queries, [tiles, b, t, G, R, H].
        start: Slot of the first query of each tile, int32 [tiles].
        arrays: Mask arrays for each query, int32 [tiles, b, t, ...].
    """

    query: jax.Array
    start: jax.Array
    arrays: tuple[jax.Array, ...] = ()


class KeyChunks(NamedTuple):
    """Chunks of keys and values.

    Attributes:
        key: Keys, [chunks, b, c, G, H].
        value: Values, [chunks, b, c, G, V].
        start: Slot of the first key of each chunk, int32 [chunks].
        arrays: Mask arrays for each key, int32 [chunks, b, c].
    """

    key: jax.Array
    value: jax.Array
    start: jax.Array
    arrays: tuple[jax.Array, ...] = ()


class RunningSoftmax(NamedTuple):
    """The state of a running softmax, float32.

    Attributes:
        values: Sums of weighted values, [tiles, b, G, R, t, V].
        weight: Sums of weights, [tiles, b, G, R, t].
        top: Maxima of the scores, [tiles, b, G, R, t].
    """

    values: jax.Array
    weight: jax.Array
    top: jax.Array

    @classmethod
    def empty(cls, tiles: QueryTiles, width: int) -> "RunningSoftmax":
        """Return the state before any keys."""
        n, b, t, groups, repeats, _ = tiles.query.shape
        shape = (n, b, groups, repeats, t)
        return cls(jnp.zeros((*shape, width)), jnp.zeros(shape), jnp.full(shape, HIDDEN))

    def finish(self) -> tuple[jax.Array, jax.Array]:
        """Return the outputs and the log-sum-exp of the scores. Outputs are zero for queries without visible keys."""
        weight = jnp.where(self.weight > 0, self.weight, 1.0)
        return self.values / weight[..., None], self.top + jnp.log(weight)


class Scores:
    """The scores and the mask of an attention op."""

    def __init__(self, op: AttentionOp, heads: Any = None):
        """Read an op's settings, but not its operands.

        Args:
            op: The op, with its mask, scale, soft cap and bias.
            heads: (mesh axes that the query heads are sharded over, number of local heads). None if all heads are local.
        """
        self.parts, self.tree = jax.tree.flatten(op.mask)
        self.roles = jax.tree.leaves(op.mask.roles())
        self.rows = op.query.shape[0]
        self.mask, self.scale, self.softcap, self.bias, self.heads = op.mask, op.scale, op.softcap, op.bias, heads

    def select_role(self, role: str) -> tuple[jax.Array, ...]:
        """Return the mask arrays for `queries`, `keys` or `rows`."""
        selected = [a for a, r in zip(self.parts, self.roles, strict=True) if r == role]
        return tuple(jnp.broadcast_to(a, (self.rows, *a.shape[1:])) for a in selected)

    def may_see(self, query: jax.Array, queries: int, key: jax.Array, keys: int) -> jax.Array:
        """Return whether any query in a range of slots may see any key in a range of slots, as a bool scalar."""
        return _may_see(self.mask, (query, query + queries - 1), (key, key + keys - 1))

    def raw(self, query: jax.Array, key: jax.Array, query_slots: jax.Array, key_slots: jax.Array) -> jax.Array:
        """Return the scores before masking, float32 [b, G, R, t, c]."""
        scores = jnp.einsum("btgrh,bcgh->bgrtc", query, key, preferred_element_type=jnp.float32) * self.scale
        if self.softcap is not None:
            scores = self.softcap * jnp.tanh(scores / self.softcap)
        if self.bias is not None:
            ranges = ((0, query.shape[1]), (0, key.shape[1]))
            bias = self.bias.materialize(*ranges, query_slots, key_slots)
            if self.heads is not None:
                axes, count = self.heads
                bias = lax.dynamic_slice_in_dim(bias, lax.axis_index(axes) * count, count, axis=1)
            scores = scores + bias.reshape(bias.shape[0], *scores.shape[1:3], *bias.shape[2:])
        return scores

    def visible(self, query: Any, key: Any, rows: tuple[jax.Array, ...], sizes: tuple[int, int]) -> jax.Array:
        """Return the mask, bool [b or 1, 1, 1, t, c]. `query` and `key` are (slots, arrays)."""
        arrays = {"queries": iter(query[1]), "keys": iter(key[1]), "rows": iter(rows)}
        mask = self.tree.unflatten([next(arrays[role]) for role in self.roles])
        return mask.materialize((0, sizes[0]), (0, sizes[1]), query[0], key[0])[:, None, None]


def _parts(mask: Any) -> tuple[masks.Mask, ...]:
    return mask.masks


def _may_see(mask: Any, queries: Any, keys: Any) -> jax.Array:
    if isinstance(mask, masks.Causal):
        return keys[0] <= queries[1]
    if isinstance(mask, masks.SlidingWindow):
        return keys[1] > queries[0] - mask.size  # type: ignore[attr-defined]
    if isinstance(mask, masks.Chunks):
        if mask.queries is not None or mask.keys is not None:
            return (keys[1] > queries[0] - mask.size) & (keys[0] < queries[1] + mask.size)
        return (keys[1] // mask.size >= queries[0] // mask.size) & (keys[0] // mask.size <= queries[1] // mask.size)
    if isinstance(mask, masks.FixedPrefix) and mask.keys is None:
        return keys[0] < mask.size
    if isinstance(mask, (masks.And, masks.Or)):
        parts = jnp.stack([_may_see(m, queries, keys) for m in _parts(mask)])
        return jnp.any(parts) if isinstance(mask, masks.Or) else jnp.all(parts)
    return jnp.asarray(True)


def _slots(start: jax.Array, count: int) -> jax.Array:
    return (start + jnp.arange(count, dtype=jnp.int32))[None]


def _pairs(tiles: QueryTiles, chunks: KeyChunks, scores: Scores, rows: tuple[jax.Array, ...]) -> Callable[..., Any]:
    """Return a function of (tile, chunk) that returns three values.

    The values are: whether any pair is visible, a function that returns the mask, and a function that maps query and key to
        scores.
    """
    sizes = tiles.query.shape[2], chunks.key.shape[2]

    def pair(tile: QueryTiles, chunk: KeyChunks) -> Any:
        queries, keys = _slots(tile.start, sizes[0]), _slots(chunk.start, sizes[1])
        # The condition depends on the tile even if the mask never hides a whole chunk; see `_bind_start` in `context`.
        any_visible = scores.may_see(tile.start, sizes[0], chunk.start, sizes[1]) & (tile.start >= 0)
        visible = lambda: scores.visible((queries, tile.arrays), (keys, chunk.arrays), rows, sizes)  # noqa: E731
        return any_visible, visible, lambda q, k: scores.raw(q, k, queries, keys)

    return pair


def add_chunks(
    tiles: QueryTiles, chunks: KeyChunks, scores: Scores, rows: tuple[jax.Array, ...], sums: RunningSoftmax
) -> RunningSoftmax:
    """Update a running softmax with chunks of keys and values."""
    pair = _pairs(tiles, chunks, scores, rows)

    def tile_step(_: None, tile_and_sums: tuple[QueryTiles, RunningSoftmax]) -> tuple[None, RunningSoftmax]:
        tile, old = tile_and_sums

        def chunk_step(old: RunningSoftmax, chunk: KeyChunks) -> tuple[RunningSoftmax, None]:
            any_visible, visible, raw = pair(tile, chunk)

            def update(old: RunningSoftmax) -> RunningSoftmax:
                mask = visible()
                logits = jnp.where(mask, raw(tile.query, chunk.key), HIDDEN)
                top = jnp.maximum(old.top, jnp.max(logits, axis=-1))
                weights = jnp.where(mask, jnp.exp(logits - top[..., None]), 0.0)
                shrink = jnp.exp(old.top - top)
                values = jnp.einsum(
                    "bgrtc,bcgv->bgrtv",
                    weights.astype(chunk.value.dtype),
                    chunk.value,
                    preferred_element_type=jnp.float32,
                )
                return RunningSoftmax(
                    old.values * shrink[..., None] + values, old.weight * shrink + jnp.sum(weights, axis=-1), top
                )

            return lax.cond(any_visible, update, lambda old: old, old), None

        return None, lax.scan(chunk_step, old, chunks)[0]

    return lax.scan(tile_step, None, (tiles, sums))[1]


class Residuals(NamedTuple):
    """Values per query that the gradients need, float32.

    Attributes:
        grads: Gradients of the outputs, [tiles, b, G, R, t, V].
        log_sum: Log-sum-exp of all scores, [tiles, b, G, R, t].
        inner: Inner product of each output and its gradient, [tiles, b, G, R, t].
    """

    grads: jax.Array
    log_sum: jax.Array
    inner: jax.Array


def gradients(
    tiles: QueryTiles, chunks: KeyChunks, scores: Scores, rows: tuple[jax.Array, ...], residuals: Residuals
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the contributions of these keys to the gradients of queries, keys and values, in float32."""
    pair = _pairs(tiles, chunks, scores, rows)

    def tile_step(totals: Any, tile_and_residual: tuple[QueryTiles, Residuals]) -> Any:
        tile, residual = tile_and_residual

        def chunk_step(grad_query: jax.Array, chunk: KeyChunks) -> Any:
            any_visible, visible, raw = pair(tile, chunk)

            def compute() -> Any:
                logits, pull = jax.vjp(raw, tile.query, chunk.key)
                weights = jnp.where(visible(), jnp.exp(logits - residual.log_sum[..., None]), 0.0)
                grad_value = jnp.einsum("bgrtc,bgrtv->bcgv", weights, residual.grads)
                value = chunk.value.astype(jnp.float32)
                grad_weights = jnp.einsum("bgrtv,bcgv->bgrtc", residual.grads, value)
                grad_query, grad_key = pull(weights * (grad_weights - residual.inner[..., None]))
                return tuple(x.astype(jnp.float32) for x in (grad_query, grad_key, grad_value))

            shapes = tile.query.shape, chunk.key.shape, chunk.value.shape
            more, *grad_chunk = lax.cond(any_visible, compute, lambda: tuple(jnp.zeros(s, jnp.float32) for s in shapes))
            return grad_query + more, grad_chunk

        grad_query, grad_chunks = lax.scan(chunk_step, jnp.zeros(tile.query.shape, jnp.float32), chunks)
        return [a + b for a, b in zip(totals, grad_chunks, strict=True)], grad_query

    zeros = [jnp.zeros(x.shape, jnp.float32) for x in (chunks.key, chunks.value)]
    (grad_key, grad_value), grad_query = lax.scan(tile_step, zeros, (tiles, residuals))
    return grad_query, grad_key, grad_value
