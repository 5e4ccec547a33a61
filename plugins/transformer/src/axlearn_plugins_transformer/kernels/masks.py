"""Symbolic attention masks: no array exists until a kernel asks for one, and a kernel can ask which blocks it may skip.

    mask = Causal() & SlidingWindow(4096) & Segments(ids, ids)

The structure of a mask is static (it is part of the pytree's structure, and compares and hashes); what depends on the
data, such as segment ids, are its leaves. Queries and keys are counted by slot: the index in the row, or in the cache.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_core.nn.layer import Context

Range = tuple[int, int]

BLOCKS = 64
"""Blocks of queries, and of keys, that `visible_pairs` asks a mask about."""


class Mask:
    """The base of all masks."""

    def block(self, queries: Range, keys: Range) -> bool | None:
        """Whether all (True), none (False) or some or unknown (None) of the keys are visible to the queries.

        Only meaningful where query i and key i are the same position.
        """
        return None

    def materialize(
        self, queries: Range, keys: Range, query_slots: jax.Array | None = None, key_slots: jax.Array | None = None
    ) -> jax.Array:
        """bool [B or 1, queries, keys]: True where the key is visible.

        Args:
            queries: the part of the queries that is wanted, (from, to).
            keys: the part of the keys.
            query_slots: int32 [B or 1, Q], the slot of each query; None means slot i for query i.
            key_slots: the same for the keys.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """The structure in words, for a kernel that accepts some structures only."""
        return type(self).__name__.lower()

    def __and__(self, other: "Mask") -> "Mask":
        return And((*self.parts, *other.parts)) if isinstance(other, And) else And((*self.parts, other))

    def __or__(self, other: "Mask") -> "Mask":
        return Or((self, other))

    @property
    def parts(self) -> tuple["Mask", ...]:
        """The masks that all have to agree."""
        return (self,)


def _mask(cls: Any) -> Any:
    return jax.tree_util.register_dataclass(dataclass(frozen=True)(cls))


def _static(**kwargs: Any) -> Any:
    return field(metadata={"static": True}, **kwargs)


def slots_of(part: Range, slots: jax.Array | None, axis: int) -> jax.Array:
    """Slots as [B or 1, n, 1] for queries (axis 1) or [B or 1, 1, n] for keys (axis 2)."""
    if slots is None:
        shape = (1, part[1] - part[0], 1) if axis == 1 else (1, 1, part[1] - part[0])
        return jax.lax.broadcasted_iota(jnp.int32, shape, axis) + part[0]
    return jnp.expand_dims(slots[:, part[0] : part[1]], 3 - axis)


@_mask
class Full(Mask):
    """Every key is visible."""

    def block(self, queries: Range, keys: Range) -> bool | None:
        """Always all."""
        return True

    def materialize(self, queries, keys, query_slots=None, key_slots=None) -> jax.Array:
        """All True."""
        return jnp.ones((1, queries[1] - queries[0], keys[1] - keys[0]), bool)


@_mask
class Causal(Mask):
    """A query sees itself and what came before it."""

    def block(self, queries: Range, keys: Range) -> bool | None:
        """By the corners of the block."""
        if keys[0] > queries[1] - 1:
            return False
        return True if keys[1] - 1 <= queries[0] else None

    def materialize(self, queries, keys, query_slots=None, key_slots=None) -> jax.Array:
        """key <= query."""
        return slots_of(keys, key_slots, 2) <= slots_of(queries, query_slots, 1)


@_mask
class SlidingWindow(Mask):
    """A query sees the last `size` keys, itself included, and all later ones (combine it with `Causal`)."""

    size: int = _static()

    def block(self, queries: Range, keys: Range) -> bool | None:
        """By the corners of the block."""
        if keys[1] - 1 <= queries[0] - self.size:
            return False
        return True if keys[0] > queries[1] - 1 - self.size else None

    def materialize(self, queries, keys, query_slots=None, key_slots=None) -> jax.Array:
        """key > query - size."""
        return slots_of(keys, key_slots, 2) > slots_of(queries, query_slots, 1) - self.size

    def describe(self) -> str:
        """With the size."""
        return f"slidingwindow({self.size})"


@_mask
class Segments(Mask):
    """A query sees the keys of its own document: int32 [B, Q] and [B, K] segment ids."""

    queries: jax.Array
    keys: jax.Array

    def materialize(self, queries, keys, query_slots=None, key_slots=None) -> jax.Array:
        """Equal ids."""
        return self.queries[:, queries[0] : queries[1], None] == self.keys[:, None, keys[0] : keys[1]]


@_mask
class Prefix(Mask):
    """Every query sees the first `length` keys of its row: int32 [B]."""

    length: jax.Array

    def materialize(self, queries, keys, query_slots=None, key_slots=None) -> jax.Array:
        """key < length."""
        visible = slots_of(keys, key_slots, 2) < self.length[:, None, None]
        return jnp.broadcast_to(visible, (visible.shape[0], queries[1] - queries[0], visible.shape[2]))


@_mask
class And(Mask):
    """What all of the masks let through."""

    masks: tuple[Mask, ...]

    def block(self, queries: Range, keys: Range) -> bool | None:
        """None visible where one says so; all where all do."""
        blocks = [m.block(queries, keys) for m in self.masks]
        return False if False in blocks else (True if all(blocks) else None)

    def materialize(self, queries, keys, query_slots=None, key_slots=None) -> jax.Array:
        """The conjunction, without the parts that are known to let everything through."""
        aligned = query_slots is None and key_slots is None
        parts = [m for m in self.masks if not (aligned and m.block(queries, keys))] or [Full()]
        result = parts[0].materialize(queries, keys, query_slots, key_slots)
        for part in parts[1:]:
            result = result & part.materialize(queries, keys, query_slots, key_slots)
        return result

    def describe(self) -> str:
        """All parts, sorted."""
        return " & ".join(sorted(m.describe() for m in self.masks))

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The masks."""
        return self.masks


@_mask
class Or(Mask):
    """What one of the masks lets through."""

    masks: tuple[Mask, ...]

    def block(self, queries: Range, keys: Range) -> bool | None:
        """All visible where one says so; none where all do."""
        blocks = [m.block(queries, keys) for m in self.masks]
        return True if True in blocks else (False if all(f is False for f in blocks) else None)

    def materialize(self, queries, keys, query_slots=None, key_slots=None) -> jax.Array:
        """The disjunction."""
        result = self.masks[0].materialize(queries, keys, query_slots, key_slots)
        for part in self.masks[1:]:
            result = result | part.materialize(queries, keys, query_slots, key_slots)
        return result

    def describe(self) -> str:
        """All parts, sorted."""
        return "(" + " | ".join(sorted(m.describe() for m in self.masks)) + ")"


def visible(context: Context, window: int | None = None, *, causal: bool = True) -> Mask:
    """The keys that a query of a causal decoder sees: the last `window` of the past, and the prefix, within its document.

    In an encoder (not `causal`) it also sees all that comes later.
    """
    mask: Mask = Causal() if causal else Full()
    if window is not None:
        mask = mask & SlidingWindow(window)
    if context.prefix is not None:
        mask = mask | Prefix(context.prefix)
    if context.segment_ids is not None:
        mask = mask & Segments(context.segment_ids, context.segment_ids)
    return mask


def visible_pairs(mask: Mask, queries: int, keys: int) -> float:
    """The share of (query, key) pairs that a mask shows, by its structure; a block that is shown in part counts as half.

    Parts that depend on the data (segments, prefixes) count as if they showed everything: rows of one document.
    """
    parts = [p for p in mask.parts if not jax.tree.leaves(p)]
    if not parts or queries != keys:
        return 1.0
    blocks = max(1, min(BLOCKS, queries))
    edges = [i * queries // blocks for i in range(blocks + 1)]
    ranges = list(itertools.pairwise(edges))
    pairs = 0.0
    for rows in ranges:
        for columns in ranges:
            answers = [part.block(rows, columns) for part in parts]
            share = 0.0 if False in answers else 1.0 if all(answers) else 0.5
            pairs += share * (rows[1] - rows[0]) * (columns[1] - columns[0])
    return pairs / (queries * keys)
