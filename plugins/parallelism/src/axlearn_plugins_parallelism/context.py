"""Attention over a sequence that is split over devices: implementations of the op `attention`, by name only.

B rows, S positions, N query heads, G key-value heads, H head size; b, s of one device.
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
from axlearn_plugins_parallelism.blockwise import Chunks, Kept, Scores, Sums, Tiles, add, gradients
from axlearn_plugins_parallelism.zigzag import Parts
from axlearn_plugins_transformer.kernels.attention import AttentionOp

TILE = 512
"""Queries whose scores are in memory at one time, with those of all keys of a chunk."""
QUERY = ("batch", "sequence", "activation_heads", None)
KEY = ("batch", "sequence", "activation_kv", None)


def sequence_axes(place: Placement | None) -> tuple[str, ...]:
    """The mesh axes of more than one device that the sequence is split over."""
    if place is None:
        return ()
    batch_axes = place.rules.get("batch", ())
    return tuple(a for a in place.rules.get("sequence", ()) if place.mesh.shape[a] > 1 and a not in batch_axes)


def _count(place: Placement, axes: Sequence[str]) -> int:
    return math.prod(place.mesh.shape[a] for a in axes)


_whole_sequence: contextvars.ContextVar[bool] = contextvars.ContextVar("axlearn_whole_sequence", default=False)


def _attend_whole(op: AttentionOp) -> jax.Array:
    """By the best other kernel; by the reference where no other is declared."""
    if _whole_sequence.get():
        return op.reference()
    token = _whole_sequence.set(True)
    try:
        return op.run()
    finally:
        _whole_sequence.reset(token)


class _OverSequence:
    """The base: what is asked of all, and what happens where the sequence is not split."""

    def supports(self, op: AttentionOp, context: KernelContext) -> str | None:
        """Self-attention over a sequence that its devices divide, and anything over a sequence that is not split."""
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
        """[B, S, N, V]; where the sequence is whole, by the best other kernel."""
        place = placement()
        if place is None or not sequence_axes(place):
            return _attend_whole(op)
        return self._run(place, op)

    def _run(self, place: Placement, op: AttentionOp) -> jax.Array:
        raise NotImplementedError


class _PerDevice(_OverSequence):
    """The base of those in which every device has its own queries and sees all keys, by and by or at once."""

    keys: Callable[..., Any]

    def _run(self, place: Placement, op: AttentionOp) -> jax.Array:
        query, key, value = op.query, op.key, op.value
        axes = sequence_axes(place)
        batch, sequence, heads, *_ = place.spec(query.shape, QUERY)
        if place.spec(key.shape, KEY)[2] != heads:  # fewer key-value heads than devices that share the heads
            key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))
        scores = Scores(op)
        arrays = {role: scores.of_role(role) for role in ("queries", "keys", "rows")}
        whole, rows = PartitionSpec(batch, sequence, heads), PartitionSpec(batch, sequence)
        by_role = {"queries": rows, "keys": rows, "rows": PartitionSpec(batch)}
        specs = {role: tuple(by_role[role] for _ in values) for role, values in arrays.items()}

        def run(q: jax.Array, k: jax.Array, v: jax.Array, arrays: Any) -> jax.Array:
            local = Scores(op, (heads, q.shape[2]) if heads else None)
            parts = Parts.of(axes, _count(place, axes), q.shape[1])
            return _attend(self.keys, local, parts, q, k, v, arrays)

        return jax.shard_map(
            run, mesh=place.mesh, in_specs=(whole, whole, whole, specs), out_specs=whole, check_vma=False
        )(query, key, value, arrays)


class Held(NamedTuple):
    """The keys of one device, in halves, as they go around: see `Chunks`."""

    key: jax.Array
    value: jax.Array
    arrays: tuple[jax.Array, ...]


def _attend(
    keys: Callable[..., Any], scores: Scores, parts: Parts, q: jax.Array, k: jax.Array, v: jax.Array, arrays: Any
) -> jax.Array:
    """[b, s, N, H], [b, s, G, H], [b, s, G, V] -> [b, s, N, V], on one device among others."""
    batch, _, heads, size = q.shape
    q, k, v = (parts.spread(x) for x in (q, k, v))
    spread_arrays = {role: tuple(parts.spread(a) for a in arrays[role]) for role in ("queries", "keys")}
    tile = math.gcd(parts.size, TILE) if parts.size > TILE else parts.size

    def cut(x: jax.Array) -> jax.Array:
        tiled = x.reshape(parts.halves, batch, parts.size // tile, tile, *x.shape[3:])
        return jnp.swapaxes(tiled, 1, 2).reshape(-1, batch, tile, *x.shape[3:])

    start = parts.start(lax.axis_index(parts.axes))[:, None] + jnp.arange(0, parts.size, tile, dtype=jnp.int32)[None]
    grouped = q.reshape(*q.shape[:3], k.shape[3], heads // k.shape[3], size)
    tiles = Tiles(cut(grouped), start.reshape(-1), tuple(cut(a) for a in spread_arrays["queries"]))
    out = keys(scores, parts, tiles, Held(k, v, spread_arrays["keys"]), arrays["rows"])  # [tiles, b, G, R, t, V]
    out = jnp.moveaxis(out, 4, 2).reshape(parts.halves, -1, batch, tile, heads, out.shape[-1])
    out = jnp.swapaxes(out, 1, 2).reshape(parts.halves, batch, parts.size, heads, out.shape[-1])
    return parts.gather(out)


def _softmax_attention(scores: Scores, visit: Callable[..., Any]) -> Callable[..., jax.Array]:
    """`(tiles, held, rows) -> outputs` with a derivative of its own, which computes all scores again.

    `visit(step, start, held)` takes `step(state, chunks) -> (state, by_key, by_value)` to every device's keys, and gives the
    state at the end with the sums of the gradients by the keys that are held here.
    """

    @jax.custom_vjp
    def run(tiles: Tiles, block: Held, rows: Any) -> jax.Array:
        return forward(tiles, block, rows)[0]

    def forward(tiles: Tiles, block: Held, rows: Any) -> Any:
        def step(sums: Sums, chunks: Chunks) -> Sums:
            return add(tiles, chunks, scores, rows, sums)

        sums, _ = visit(step, Sums.empty(tiles, block.value.shape[-1]), block, False)
        values, log_sum = sums.finished()
        out = values.astype(block.value.dtype)
        return out, (tiles, block, rows, out, log_sum)

    def backward(saved: Any, grads: jax.Array) -> Any:
        tiles, block, rows, out, log_sum = saved
        grads = grads.astype(jnp.float32)
        residuals = Kept(grads, log_sum, jnp.sum(out.astype(jnp.float32) * grads, axis=-1))

        def step(total: jax.Array, chunks: Chunks) -> Any:
            by_query, *by_keys = gradients(tiles, chunks, scores, rows, residuals)
            return total + by_query, tuple(by_keys)

        by_query, by_keys = visit(step, jnp.zeros(tiles.query.shape, jnp.float32), block, True)
        by_key, by_value = (g.astype(x.dtype) for g, x in zip(by_keys, (block.key, block.value), strict=True))
        return Tiles(by_query.astype(tiles.query.dtype), None, None), Held(by_key, by_value, None), None  # type: ignore[arg-type]

    run.defvjp(forward, backward)
    return run


class _Ring(_PerDevice):
    """Ring attention (Liu et al., 2023): keys and values go around, and each device adds what it has at the moment.

    The transfer of the next keys and the work on these do not depend on one another. No device ever holds the keys of
    more than two. In the backward pass they go around once more, with their gradients.
    """

    @staticmethod
    def keys(scores: Scores, parts: Parts, tiles: Tiles, block: Held, rows: Any) -> jax.Array:
        """[tiles, b, G, R, t, V]."""

        def visit(step: Callable[..., Any], state: Any, block: Held, differentiates: bool) -> Any:
            me = lax.axis_index(parts.axes)

            def at(turn: Any, block: Held) -> Chunks:
                return Chunks(block.key, block.value, parts.start((me - turn) % parts.devices), block.arrays)

            def stop(state: Any, total: Any, chunks: Chunks) -> Any:
                if not differentiates:
                    return step(state, chunks), total
                state, more = step(state, chunks)
                return state, parts.ring(tuple(a + b for a, b in zip(total, more, strict=True)))

            def body(carry: Any, turn: jax.Array) -> Any:
                state, block, total = carry
                return (*_swap(stop(state, total, at(turn, block)), parts.ring(block)),), None

            total = tuple(jnp.zeros(x.shape, jnp.float32) for x in block[:2]) if differentiates else ()
            last = parts.devices - 1
            (state, block, total), _ = lax.scan(body, (state, block, total), jnp.arange(last))
            return stop(state, total, at(last, block))

        return _softmax_attention(scores, visit)(tiles, block, rows)


def _swap(stopped: tuple[Any, Any], block: Any) -> tuple[Any, Any, Any]:
    state, total = stopped
    return state, block, total


class _AllGather(_PerDevice):
    """Every device gathers all keys and values, and works on its own queries (Dubey et al., 2024, section 3.3.2)."""

    @staticmethod
    def keys(scores: Scores, parts: Parts, tiles: Tiles, block: Held, rows: Any) -> jax.Array:
        """[tiles, b, G, R, t, V]."""

        def visit(step: Callable[..., Any], state: Any, block: Held, differentiates: bool) -> Any:
            start = jnp.concatenate([parts.start(device) for device in range(parts.devices)])
            new_state = step(state, Chunks(block.key, block.value, start, block.arrays))
            return new_state if differentiates else (new_state, ())

        block = jax.tree.map(lambda x: lax.all_gather(x, parts.axes, axis=0, tiled=True), block)
        return _softmax_attention(scores, visit)(tiles, block, rows)


class _AllToAll(_OverSequence):
    """Every device gets all positions of some heads, and the best other implementation (Jacobs et al., 2023, "Ulysses")."""

    def _refuses(self, op: AttentionOp, place: Placement, axes: Sequence[str]) -> str | None:
        heads, across = op.query.shape[2], self._sequence_split(place, axes)
        if heads % _count(place, across):
            return f"{heads} heads are not divisible by the mesh axes {', '.join(across)} ({_count(place, across)} devices)"
        return None

    @staticmethod
    def _sequence_split(place: Placement, axes: Sequence[str]) -> tuple[str, ...]:
        own = tuple(a for a in place.rules.get("activation_heads", ()) if place.mesh.shape[a] > 1)
        return (*own, *(a for a in axes if a not in own))

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
