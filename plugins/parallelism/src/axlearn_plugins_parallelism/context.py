"""Attention kernels for sequences that are sharded over devices. They are used only if the config names them.

Shapes: B rows, S positions, N query heads, G key-value heads, H head size, V value size. b and s are the rows and positions on one
device.
"""

import contextvars
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.nn.sharding import Placement, constrain, logical_rules, placement
from axlearn_plugins_parallelism.blockwise import (
    KeyChunks,
    QueryTiles,
    Residuals,
    RunningSoftmax,
    Scores,
    add_chunks,
    gradients,
)
from axlearn_plugins_parallelism.zigzag import Parts
from axlearn_plugins_transformer.kernels.attention import AttentionOp

TILE = 512
"""Maximum number of queries per tile. The scores of one tile and one chunk are in memory at a time."""
QUERY = ("batch", "sequence", "activation_heads", None)
KEY = ("batch", "sequence", "activation_kv", None)


def sequence_axes(place: Placement | None) -> tuple[str, ...]:
    """Return the mesh axes of size above 1 that the sequence is sharded over."""
    if place is None:
        return ()
    batch_axes = place.rules.get("batch", ())
    return tuple(a for a in place.rules.get("sequence", ()) if place.mesh.shape[a] > 1 and a not in batch_axes)


def _count(place: Placement, axes: Sequence[str]) -> int:
    return math.prod(place.mesh.shape[a] for a in axes)


_whole_sequence: contextvars.ContextVar[bool] = contextvars.ContextVar("axlearn_whole_sequence", default=False)


def _attend_unsharded(op: AttentionOp) -> jax.Array:
    """Run the best kernel for unsharded sequences, or the reference if the selection would choose this kernel again."""
    if _whole_sequence.get():
        return op.reference()
    token = _whole_sequence.set(True)
    try:
        return op.run()
    finally:
        _whole_sequence.reset(token)


class _SequenceKernel:
    """Base class for kernels for sharded sequences. Falls back to a different kernel if the sequence is not sharded."""

    def supports(self, op: AttentionOp, context: KernelContext) -> str | None:
        """Return the reason why a call is not supported, or None.

        Supports every call with an unsharded sequence, and self-attention if the sequence length is divisible by the number of
        devices.
        """
        place = placement()
        axes = sequence_axes(place)
        if place is None or not axes:
            return None
        if not op.aligned:
            return "queries and keys are not the same positions"
        length, count = op.query.shape[1], _count(place, axes)
        if length % count:
            return f"the sequence length {length} is not divisible by the mesh axes {', '.join(axes)} ({count} devices)"
        return self._refuses(op, place, axes)

    def _refuses(self, op: AttentionOp, place: Placement, axes: Sequence[str]) -> str | None:
        return None

    def __call__(self, op: AttentionOp) -> jax.Array:
        """Run the op: [B, S, N, V]. If the sequence is not sharded, use the best kernel for that case."""
        place = placement()
        if place is None or not sequence_axes(place):
            return _attend_unsharded(op)
        return self._run(place, op)

    def _run(self, place: Placement, op: AttentionOp) -> jax.Array:
        raise NotImplementedError


class _BlockwiseKernel(_SequenceKernel):
    """Base class for kernels that keep queries on their device and bring all keys to them."""

    keys: Callable[..., Any]

    def _run(self, place: Placement, op: AttentionOp) -> jax.Array:
        query, key, value = op.query, op.key, op.value
        axes = sequence_axes(place)
        batch, sequence, heads, *_ = place.spec(query.shape, QUERY)
        if place.spec(key.shape, KEY)[2] != heads:  # too few key-value heads to shard like the query heads
            key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))
        scores = Scores(op)
        arrays = {role: scores.select_role(role) for role in ("queries", "keys", "rows")}
        spec, rows = PartitionSpec(batch, sequence, heads), PartitionSpec(batch, sequence)
        by_role = {"queries": rows, "keys": rows, "rows": PartitionSpec(batch)}
        specs = {role: tuple(by_role[role] for _ in values) for role, values in arrays.items()}

        def run(q: jax.Array, k: jax.Array, v: jax.Array, arrays: Any) -> jax.Array:
            local = Scores(op, (heads, q.shape[2]) if heads else None)
            parts = Parts.from_axes(axes, _count(place, axes), q.shape[1])
            return _attend(self.keys, local, parts, q, k, v, arrays)

        return jax.shard_map(run, mesh=place.mesh, in_specs=(spec, spec, spec, specs), out_specs=spec, check_vma=False)(
            query, key, value, arrays
        )


class KeyBlock(NamedTuple):
    """The keys and values of one device, in halves. See `KeyChunks`."""

    key: jax.Array
    value: jax.Array
    arrays: tuple[jax.Array, ...]


def _attend(
    keys: Callable[..., Any], scores: Scores, parts: Parts, q: jax.Array, k: jax.Array, v: jax.Array, arrays: Any
) -> jax.Array:
    """Run attention inside a `shard_map`: [b, s, N, H], [b, s, G, H], [b, s, G, V] -> [b, s, N, V]."""
    batch, _, heads, size = q.shape
    q, k, v = (parts.spread(x) for x in (q, k, v))
    spread_arrays = {role: tuple(parts.spread(a) for a in arrays[role]) for role in ("queries", "keys")}
    tile = math.gcd(parts.size, TILE) if parts.size > TILE else parts.size

    def cut(x: jax.Array) -> jax.Array:
        tiled = x.reshape(parts.halves, batch, parts.size // tile, tile, *x.shape[3:])
        return jnp.swapaxes(tiled, 1, 2).reshape(-1, batch, tile, *x.shape[3:])

    start = parts.start(lax.axis_index(parts.axes))[:, None] + jnp.arange(0, parts.size, tile, dtype=jnp.int32)[None]
    grouped = q.reshape(*q.shape[:3], k.shape[3], heads // k.shape[3], size)
    tiles = QueryTiles(cut(grouped), start.reshape(-1), tuple(cut(a) for a in spread_arrays["queries"]))
    out = keys(scores, parts, tiles, KeyBlock(k, v, spread_arrays["keys"]), arrays["rows"])  # [tiles, b, G, R, t, V]
    out = jnp.moveaxis(out, 4, 2).reshape(parts.halves, -1, batch, tile, heads, out.shape[-1])
    out = jnp.swapaxes(out, 1, 2).reshape(parts.halves, batch, parts.size, heads, out.shape[-1])
    return parts.gather(out)


def _softmax_attention(scores: Scores, visit: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Return a function `(tiles, block, rows) -> outputs` with a custom gradient that recomputes all scores.

    `visit(step, state, block, differentiates)` applies `step` to the keys of every device. In the forward pass the step is
    `step(state, chunks) -> state`. If `differentiates`, it is `step(state, chunks) -> (state, (grad_key, grad_value))`. `visit`
    returns the final state and the summed gradients of the local keys and values.
    """

    @jax.custom_vjp
    def run(tiles: QueryTiles, block: KeyBlock, rows: Any) -> jax.Array:
        return forward(tiles, block, rows)[0]

    def forward(tiles: QueryTiles, block: KeyBlock, rows: Any) -> Any:
        tiles = _bind_start(tiles)

        def step(sums: RunningSoftmax, chunks: KeyChunks) -> RunningSoftmax:
            return add_chunks(tiles, chunks, scores, rows, sums)

        sums, _ = visit(step, RunningSoftmax.empty(tiles, block.value.shape[-1]), block, False)
        values, log_sum = sums.finish()
        out = values.astype(block.value.dtype)
        return out, (tiles, block, rows, out, log_sum)

    def backward(saved: Any, grads: jax.Array) -> Any:
        tiles, block, rows, out, log_sum = saved
        grads = grads.astype(jnp.float32)
        residuals = Residuals(grads, log_sum, jnp.sum(out.astype(jnp.float32) * grads, axis=-1))

        def step(total: jax.Array, chunks: KeyChunks) -> Any:
            grad_query, *grad_keys = gradients(tiles, chunks, scores, rows, residuals)
            return total + grad_query, tuple(grad_keys)

        grad_query, grad_keys = visit(step, jnp.zeros(tiles.query.shape, jnp.float32), block, True)
        grad_key, grad_value = (g.astype(x.dtype) for g, x in zip(grad_keys, (block.key, block.value), strict=True))
        return QueryTiles(grad_query.astype(tiles.query.dtype), None, None), KeyBlock(grad_key, grad_value, None), None  # type: ignore[arg-type]

    run.defvjp(forward, backward)
    return run


def _bind_start(tiles: QueryTiles) -> QueryTiles:
    """Add a data dependency from the queries to their slots, so that the slots are not available before the queries.

    All masks follow from the slots. If the slots were known before the step, JAX would compute the masks of all pairs of tiles
    and chunks ahead of the layers, and keep them for the backward pass: 80 GiB per device for 32k positions on four devices.
    """
    start, _ = lax.optimization_barrier((tiles.start, tiles.query))
    return tiles._replace(start=start)


class _Ring(_BlockwiseKernel):
    """Ring attention (Liu et al., 2023), which passes keys and values around the devices.

    The transfer of the next keys overlaps with the computation on the current keys. A device never stores the keys of more than two
    devices. In the backward pass, the keys go around again, together with their gradients.
    """

    @staticmethod
    def keys(scores: Scores, parts: Parts, tiles: QueryTiles, block: KeyBlock, rows: Any) -> jax.Array:
        """Return the outputs, [tiles, b, G, R, t, V]."""

        def visit(step: Callable[..., Any], state: Any, block: KeyBlock, differentiates: bool) -> Any:
            me = lax.axis_index(parts.axes)

            def select_chunks(turn: Any, block: KeyBlock) -> KeyChunks:
                return KeyChunks(block.key, block.value, parts.start((me - turn) % parts.devices), block.arrays)

            def visit_chunks(state: Any, total: Any, chunks: KeyChunks) -> Any:
                if not differentiates:
                    return step(state, chunks), total
                state, more = step(state, chunks)
                return state, parts.ring(tuple(a + b for a, b in zip(total, more, strict=True)))

            def body(carry: Any, turn: jax.Array) -> Any:
                state, block, total = carry
                return (*_swap(visit_chunks(state, total, select_chunks(turn, block)), parts.ring(block)),), None

            total = tuple(jnp.zeros(x.shape, jnp.float32) for x in block[:2]) if differentiates else ()
            last = parts.devices - 1
            (state, block, total), _ = lax.scan(body, (state, block, total), jnp.arange(last))
            return visit_chunks(state, total, select_chunks(last, block))

        return _softmax_attention(scores, visit)(tiles, block, rows)


def _swap(result: tuple[Any, Any], block: Any) -> tuple[Any, Any, Any]:
    state, total = result
    return state, block, total


class _AllGather(_BlockwiseKernel):
    """Attention in which every device gathers all keys and values (Dubey et al., 2024, section 3.3.2)."""

    @staticmethod
    def keys(scores: Scores, parts: Parts, tiles: QueryTiles, block: KeyBlock, rows: Any) -> jax.Array:
        """Return the outputs, [tiles, b, G, R, t, V]."""

        def visit(step: Callable[..., Any], state: Any, block: KeyBlock, differentiates: bool) -> Any:
            start = jnp.concatenate([parts.start(device) for device in range(parts.devices)])
            new_state = step(state, KeyChunks(block.key, block.value, start, block.arrays))
            return new_state if differentiates else (new_state, ())

        block = jax.tree.map(lambda x: lax.all_gather(x, parts.axes, axis=0, tiled=True), block)
        return _softmax_attention(scores, visit)(tiles, block, rows)


class _AllToAll(_SequenceKernel):
    """Attention that assigns each device all positions of some heads ("Ulysses"; Jacobs et al., 2023).

    It then runs the best kernel for unsharded sequences.
    """

    def _refuses(self, op: AttentionOp, place: Placement, axes: Sequence[str]) -> str | None:
        heads, across = op.query.shape[2], self._sequence_split(place, axes)
        if heads % _count(place, across):
            return f"{heads} heads are not divisible by the mesh axes {', '.join(across)} ({_count(place, across)} devices)"
        return None

    @staticmethod
    def _sequence_split(place: Placement, axes: Sequence[str]) -> tuple[str, ...]:
        head_axes = tuple(a for a in place.rules.get("activation_heads", ()) if place.mesh.shape[a] > 1)
        return (*head_axes, *(a for a in axes if a not in head_axes))

    def _run(self, place: Placement, op: AttentionOp) -> jax.Array:
        query, key, value = op.query, op.key, op.value
        across = self._sequence_split(place, sequence_axes(place))
        if key.shape[2] % _count(place, across):
            key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))
        rules = {**place.rules, "sequence": (), "activation_heads": across, "activation_kv": across}
        with logical_rules(place.mesh, rules):
            query, key, value = (constrain(x, *axes) for x, axes in ((query, QUERY), (key, KEY), (value, KEY)))
            out = attrs.evolve(op, query=query, key=key, value=value).run()
            out = constrain(out, *QUERY)
        return constrain(out, *QUERY)


RING = _Ring()
ALL_GATHER = _AllGather()
ALL_TO_ALL = _AllToAll()
