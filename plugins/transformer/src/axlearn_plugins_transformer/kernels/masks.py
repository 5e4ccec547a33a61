"""Symbolic attention masks.

A kernel can materialize a mask, or ask which blocks it can skip.

    mask = Causal() & SlidingWindow(4096) & Segments(ids, ids)

The structure of a mask is static: it is hashable and part of the pytree structure. Data, such as segment ids, are leaves.
Queries and keys are indexed by slot: the index in the row, or in the cache.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_core.nn.layer import Context

Range = tuple[int, int]

BLOCKS = 64
"""Number of query blocks and of key blocks into which `visible_pairs` divides a mask."""


class Mask:
    """Base class for masks."""

    def block(self, queries: Range, keys: Range) -> bool | None:
        """Return whether a block of the mask is visible.

        Returns True if all keys are visible to all queries, False if none are, and None if only some are or this is unknown.
        The result is meaningful only if query i and key i have the same position.
        """
        return None

    def materialize(
        self, queries: Range, keys: Range, query_slots: jax.Array | None = None, key_slots: jax.Array | None = None
    ) -> jax.Array:
        """Return the mask, bool [B or 1, queries, keys]. It is True if the key is visible.

        Args:
            queries: Range of queries, (start, stop).
            keys: Range of keys, (start, stop).
            query_slots: Slot of each query, int32 [B or 1, Q]. None means that query i has slot i.
            key_slots: Slot of each key, int32 [B or 1, K]. None means that key i has slot i.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """Describe the structure, for kernels that support only some structures."""
        return type(self).__name__.lower()

    def __and__(self, other: "Mask") -> "Mask":
        return And((*self.parts, *other.parts)) if isinstance(other, And) else And((*self.parts, other))

    def __or__(self, other: "Mask") -> "Mask":
        return Or((self, other))

    @property
    def parts(self) -> tuple["Mask", ...]:
        """The masks that this mask combines. A (query, key) pair is visible if none of them hides it."""
        return (self,)


def _mask(cls: Any) -> Any:
    return jax.tree_util.register_dataclass(dataclass(frozen=True)(cls))


def _static(**kwargs: Any) -> Any:
    return field(metadata={"static": True}, **kwargs)


def expand_slots(part: Range, slots: jax.Array | None, axis: int) -> jax.Array:
    """Return slots as an array that broadcasts over queries and keys.

    The shape is [B or 1, n, 1] for queries (axis 1), and [B or 1, 1, n] for keys (axis 2).
    """
    if slots is None:
        shape = (1, part[1] - part[0], 1) if axis == 1 else (1, 1, part[1] - part[0])
        return jax.lax.broadcasted_iota(jnp.int32, shape, axis) + part[0]
    return jnp.expand_dims(slots[:, part[0] : part[1]], 3 - axis)


@_mask
class Full(Mask):
    """A mask that hides nothing."""

    def block(self, queries: Range, keys: Range) -> bool | None:
        """Return True."""
        return True

    def materialize(self, queries, keys, query_slots=None, key_slots=None) -> jax.Array:
        """Return an array of True."""
        return jnp.ones((1, queries[1] - queries[0], keys[1] - keys[0]), bool)


@_mask
class Causal(Mask):
    """A mask that hides later keys from each query."""

    def block(self, queries: Range, keys: Range) -> bool | None:
        """Compare the corners of the block."""
        if keys[0] > queries[1] - 1:
            return False
        return True if keys[1] - 1 <= queries[0] else None

    def materialize(self, queries, keys, query_slots=None, key_slots=None) -> jax.Array:
        """Return key <= query."""
        return expand_slots(keys, key_slots, 2) <= expand_slots(queries, query_slots, 1)


@_mask
class SlidingWindow(Mask):
    """A mask that lets each query attend to only the last `size` keys and all later keys.

    The last keys include the query's own. Combine the mask with `Causal`.
    """

    size: int = _static()

    def block(self, queries: Range, keys: Range) -> bool | None:
        """Compare the corners of the block."""
        if keys[1] - 1 <= queries[0] - self.size:
            return False
        return True if keys[0] > queries[1] - 1 - self.size else None

    def materialize(self, queries, keys, query_slots=None, key_slots=None) -> jax.Array:
        """Return key > query - size."""
        return expand_slots(keys, key_slots, 2) > expand_slots(queries, query_slots, 1) - self.size

    def describe(self) -> str:
        """Describe the mask with its size."""
        return f"slidingwindow({self.size})"


@_mask
class Segments(Mask):
    """A mask that lets each query attend to only the keys of its own document.

    Attributes:
        queries: Segment ids of the queries, int32 [B, Q].
        keys: Segment ids of the keys, int32 [B, K].
    """

    queries: jax.Array
    keys: jax.Array

    def materialize(self, queries, keys, query_slots=None, key_slots=None) -> jax.Array:
        """Return whether the segment ids are equal."""
        return self.queries[:, queries[0] : queries[1], None] == self.keys[:, None, keys[0] : keys[1]]


@_mask
class Prefix(Mask):
    """A mask that lets each query attend to only the first `length` keys of its row.

    Attributes:
        length: int32 [B].
    """

    length: jax.Array

    def materialize(self, queries, keys, query_slots=None, key_slots=None) -> jax.Array:
        """Return key < length."""
        visible = expand_slots(keys, key_slots, 2) < self.length[:, None, None]
        return jnp.broadcast_to(visible, (visible.shape[0], queries[1] - queries[0], visible.shape[2]))


@_mask
class And(Mask):
    """The conjunction of masks."""

    masks: tuple[Mask, ...]

    def block(self, queries: Range, keys: Range) -> bool | None:
        """Return False if any mask hides the block, and True if it is visible in all masks."""
        blocks = [m.block(queries, keys) for m in self.masks]
        return False if False in blocks else (True if all(blocks) else None)

    def materialize(self, queries, keys, query_slots=None, key_slots=None) -> jax.Array:
        """Return the conjunction. Parts that are known to hide nothing are skipped."""
        aligned = query_slots is None and key_slots is None
        parts = [m for m in self.masks if not (aligned and m.block(queries, keys))] or [Full()]
        result = parts[0].materialize(queries, keys, query_slots, key_slots)
        for part in parts[1:]:
            result = result & part.materialize(queries, keys, query_slots, key_slots)
        return result

    def describe(self) -> str:
        """Describe the parts, sorted."""
        return " & ".join(sorted(m.describe() for m in self.masks))

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The masks of the conjunction."""
        return self.masks


@_mask
class Or(Mask):
    """The disjunction of masks."""

    masks: tuple[Mask, ...]

    def block(self, queries: Range, keys: Range) -> bool | None:
        """Return True if the block is visible in any mask, and False if all masks hide it."""
        blocks = [m.block(queries, keys) for m in self.masks]
        return True if True in blocks else (False if all(f is False for f in blocks) else None)

    def materialize(self, queries, keys, query_slots=None, key_slots=None) -> jax.Array:
        """Return the disjunction."""
        result = self.masks[0].materialize(queries, keys, query_slots, key_slots)
        for part in self.masks[1:]:
            result = result | part.materialize(queries, keys, query_slots, key_slots)
        return result

    def describe(self) -> str:
        """Describe the parts, sorted."""
        return "(" + " | ".join(sorted(m.describe() for m in self.masks)) + ")"


def visible(context: Context, window: int | None = None, *, causal: bool = True) -> Mask:
    """Return the mask of a decoder.

    It is causal, with an optional window, the prefix and the documents of the context. Without `causal`, as in an
    encoder, queries also see all later keys.
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
    """Return the share of (query, key) pairs that a mask leaves visible, based on its structure.

    Partially visible blocks count as half. Parts that depend on data (segments, prefixes) count as if they hid nothing.
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
