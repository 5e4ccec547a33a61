"""Attention whose rows do not depend on what is computed beside them, bit for bit: for training programs and for serving.

Every query is in a tile of `ROWS` rows, which meets the keys of its request in blocks of `KEYS`, from slot 0 on, one after the
other. So the order of all sums is that of the slots, regardless of the batch, the chunks of a prompt and the pages of a cache.
Both kernels run one and the same loop over blocks; a block that a query does not see changes nothing of its sums.

They are ops of their own, so that a plugin can compute both in another order, which then has to be one and the same in both. Its
kernels decide by `traits`, which both ops of a model have in common, so that a training and a server get the same.

A program with one of them is compiled so that nothing else in it depends on the number of rows either (`hooks.py`).

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
from axlearn_plugins_transformer.kernels.masks import Causal, SlidingWindow
from axlearn_plugins_transformer.kernels.paged_attention import PagedAttentionOp, on_each_device

ROWS = 32
"""Of a product, at least: XLA for CPU multiplies 16 rows and fewer by another algorithm."""
KEYS = 128
AT_ONCE = 8
"""Tiles that are computed together."""
LOW = -1e30

Block = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""The number of a block -> its keys [G, KEYS, H] and values [G, KEYS, V]."""


def tile_tokens(heads: int) -> int:
    """C: how many tokens with `heads` query heads for each key-value head are in a tile."""
    return max(1, ROWS // heads)


def _tile(op: Any, query: jax.Array, positions: jax.Array, length: Any, blocks: Any, block: Block) -> jax.Array:
    """[C, G, n, H] at int32 [C] over the first `blocks`, which hold `length` keys -> float32 [C, G, n, V]."""
    count, groups, heads, size = query.shape
    rows = jnp.transpose(query, (1, 2, 0, 3)).reshape(groups, heads * count, size)
    rows = jnp.pad(rows, ((0, 0), (0, max(0, ROWS - heads * count)), (0, 0)))
    window = op.window

    def body(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        highest, total, result = state
        key, value = block(index)
        slots = index * KEYS + jnp.arange(KEYS, dtype=jnp.int32)
        scores = jnp.einsum("gqh,gsh->gqs", rows, key).astype(jnp.float32)
        if op.softcap is not None:
            scores = op.softcap * jnp.tanh(scores / op.softcap)
        visible = slots[None] <= positions[:, None]
        if window is not None:
            visible &= slots[None] > positions[:, None] - window
        if op.bias is not None:
            added = op.bias.materialize((0, count), (0, KEYS), positions[None], slots[None])
            added = added.reshape(groups, heads * count, KEYS)
            scores = scores + jnp.pad(added, ((0, 0), (0, scores.shape[1] - heads * count), (0, 0)))
        visible = jnp.broadcast_to(visible[None, None], (1, heads, count, KEYS)).reshape(1, heads * count, KEYS)
        visible = jnp.pad(visible, ((0, 0), (0, scores.shape[1] - heads * count), (0, 0)))
        scores = jnp.where(visible, scores, LOW)
        peak = jnp.maximum(highest, jnp.max(scores, axis=-1))
        scale = jnp.exp(highest - peak)
        weights = jnp.where(scores > LOW, jnp.exp(scores - peak[..., None]), 0.0)
        if not (isinstance(op, PagedAttentionOp) and op.finite):  # what no token wrote may be NaN
            value = jnp.where((slots < length)[None, :, None], value, 0)
        part = jnp.einsum("gqs,gsv->gqv", weights.astype(value.dtype), value).astype(jnp.float32)
        return peak, total * scale + jnp.sum(weights, axis=-1), result * scale[..., None] + part

    zeros = jnp.zeros(rows.shape[:2], jnp.float32)
    values = jax.eval_shape(block, jnp.int32(0))[1].shape[-1]
    state = zeros + LOW, zeros, jnp.zeros((*zeros.shape, values), jnp.float32)
    _, total, result = lax.fori_loop(0, blocks, body, state)
    result = result / jnp.maximum(total, 1e-30)[..., None]
    return jnp.transpose(result[:, : heads * count].reshape(groups, heads, count, -1), (2, 0, 1, 3))


def _tiles(x: jax.Array, count: int) -> jax.Array:
    """[Q, ...] -> [tiles, count, ...], padded."""
    x = jnp.pad(x, [(0, -x.shape[0] % count)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(-1, count, *x.shape[1:])


class Traits(NamedTuple):
    """What both ops of a model's layer have in common.

    Attributes:
        size: of heads.
        value_size: of values.
        dtypes: of queries, keys and values; pages hold values as keys.
        biased: whether there is a bias on the scores.
    """

    size: int
    value_size: int
    dtypes: tuple[str, str, str]
    biased: bool


def traits(op: AttentionOp | PagedAttentionOp) -> Traits:
    """Of a call of either op, or of one that is computed by the kernel `invariant`."""
    size, query, biased = op.query.shape[-1], str(op.query.dtype), op.bias is not None
    if isinstance(op, AttentionOp):
        return Traits(size, op.value.shape[-1], (query, str(op.key.dtype), str(op.value.dtype)), biased)
    pages = str(op.pages.dtype)
    return Traits(size, op.value_size or size, (query, pages, pages), biased)


@attrs.frozen(eq=False)
class InvariantAttentionOp(AttentionOp):
    """`AttentionOp` of aligned positions under a causal mask, with a window or without; nobody looks at others in it."""

    name = "invariant_attention"

    @property
    def window(self) -> int | None:
        """The last keys that a query sees; None without a limit."""
        return min((part.size for part in self.mask.parts if isinstance(part, SlidingWindow)), default=None)  # type: ignore[attr-defined]

    def reference(self) -> jax.Array:
        """[B, Q, N, V], a tile at a time."""
        return _attend_rows(self)


@attrs.frozen(eq=False)
class InvariantPagedAttentionOp(PagedAttentionOp):
    """`PagedAttentionOp` with a static split."""

    name = "invariant_paged_attention"

    def bytes(self) -> float:
        """Of what the split does not say."""
        return super().bytes() - sum(x.size * x.dtype.itemsize for x in (self.starts, self.count))

    def reference(self) -> jax.Array:
        """[T, N, V], a tile at a time; each device attends with its own heads."""
        return on_each_device(self, _attend_pages)


def _as(op_class: type[Any], op: Any) -> Any:
    return op_class(**attrs.asdict(op, recurse=False))


class _Invariant:
    """The op `attention`."""

    def supports(self, op: AttentionOp, context: KernelContext) -> str | None:
        """Causal attention."""
        if not op.aligned:
            return "queries and keys are not the same positions"
        other_masks = [p for p in op.mask.parts if not isinstance(p, (Causal, SlidingWindow))]
        if other_masks or not any(isinstance(p, Causal) for p in op.mask.parts):
            return f"the mask is {op.mask.describe()}; it takes causal ones, with a window or without"
        return None

    def __call__(self, op: AttentionOp) -> jax.Array:
        """[B, Q, N, V]."""
        return _as(InvariantAttentionOp, op).run()


def _attend_rows(op: InvariantAttentionOp) -> jax.Array:
    """[B, Q, N, V]."""
    batch, length, heads, size = op.query.shape
    groups = op.key.shape[2]
    count = tile_tokens(heads // groups)
    query = (op.query * op.scale).reshape(batch, length, groups, heads // groups, size)
    at = jnp.arange(-(-length // count) * count, dtype=jnp.int32).reshape(-1, count)

    def row(x: tuple[jax.Array, ...]) -> jax.Array:
        query, key, value = x
        keys, values = (jnp.swapaxes(jnp.pad(y, ((0, -length % KEYS), (0, 0), (0, 0))), 0, 1) for y in (key, value))

        def block(index: jax.Array) -> tuple[jax.Array, jax.Array]:
            return tuple(lax.dynamic_slice_in_dim(y, index * KEYS, KEYS, axis=1) for y in (keys, values))  # type: ignore[return-value]

        def tile(x: tuple[jax.Array, jax.Array]) -> jax.Array:
            # All blocks, though a query sees only those before it: a loop of a known length has a backward pass.
            return _tile(op, *x, length, -(-length // KEYS), block)

        result = lax.map(tile, (_tiles(query, count), at))
        return result.reshape(-1, *result.shape[2:])[:length]

    result = lax.map(row, (query, op.key, op.value))
    return result.reshape(batch, length, heads, -1).astype(op.value.dtype)


class _InvariantPaged:
    """The op `paged_attention`."""

    def supports(self, op: PagedAttentionOp, context: KernelContext) -> str | None:
        """A static split, and pages that make up blocks."""
        if op.split is None:
            return "how many tokens each request has is not known when it is compiled"
        return (
            None if KEYS % op.page_size == 0 else f"pages of {op.page_size} slots do not make up blocks of {KEYS} keys"
        )

    def __call__(self, op: PagedAttentionOp) -> jax.Array:
        """[T, N, V]."""
        return _as(InvariantPagedAttentionOp, op).run()


def _attend_pages(op: PagedAttentionOp) -> jax.Array:
    """[T, N, V]."""
    assert op.split is not None
    singles, chunk = op.split
    heads, size = op.query.shape[1:]
    groups = op.groups
    query = (op.query * op.scale).reshape(-1, groups, heads // groups, size)
    total = singles + chunk * (op.table.shape[0] - singles)
    unused, query = query.shape[0] - total, query[:total]
    pages = KEYS // op.page_size
    table = jnp.pad(op.table, ((0, 0), (0, -op.table.shape[1] % pages)))

    def tile(x: tuple[jax.Array, ...]) -> jax.Array:
        query, positions, request = x
        row = table[request]

        def block(index: jax.Array) -> tuple[jax.Array, jax.Array]:
            numbers = lax.dynamic_slice_in_dim(row, index * pages, pages)
            key, value = op.keys_and_values(numbers)
            return tuple(jnp.swapaxes(y, 0, 1).reshape(groups, KEYS, -1) for y in (key, value))  # type: ignore[return-value]

        length = op.lengths[request]
        blocks = jnp.clip((jnp.minimum(positions[-1], length - 1) // KEYS) + 1, 0, table.shape[1] // pages)
        return _tile(op, query, positions, length, blocks, block)

    parts = []
    if singles:
        requests = jnp.arange(singles, dtype=jnp.int32)
        each = query[:singles, None], op.lengths[:singles, None] - 1, requests
        parts.append(lax.map(tile, each, batch_size=min(singles, AT_ONCE)))
    if op.table.shape[0] > singles:
        parts.append(_chunks(op, query[singles:].reshape(-1, chunk, *query.shape[1:]), tile))
    results = [x.reshape(-1, heads, x.shape[-1]).astype(op.query.dtype) for x in parts]
    if unused:
        results.append(jnp.zeros((unused, *results[0].shape[1:]), results[0].dtype))
    return results[0] if len(results) == 1 else jnp.concatenate(results)


def _chunks(op: PagedAttentionOp, query: jax.Array, tile: Callable[[Any], jax.Array]) -> jax.Array:
    """[K, C, G, n, H] -> [K, C, G, n, V]."""
    many, chunk = query.shape[:2]
    singles = op.split.singles if op.split else 0
    count = tile_tokens(query.shape[3])
    tiles = jax.vmap(lambda x: _tiles(x, count))(query)
    each = tiles.shape[1]
    begin = op.lengths[singles:, None, None] - chunk
    positions = begin + jnp.arange(each * count, dtype=jnp.int32).reshape(1, each, count)
    requests = jnp.repeat(jnp.arange(singles, singles + many, dtype=jnp.int32), each)
    parts = tiles.reshape(-1, *tiles.shape[2:]), positions.reshape(-1, count), requests
    result = lax.map(tile, parts, batch_size=min(requests.shape[0], AT_ONCE))
    return result.reshape(many, each * count, *result.shape[2:])[:, :chunk]


INVARIANT, INVARIANT_PAGED = _Invariant(), _InvariantPaged()
