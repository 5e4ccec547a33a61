"""Symbolic attention masks.

A kernel can materialize a mask, or ask which blocks it can skip.

    mask = Causal() & SlidingWindow(4096) & Segments(ids, ids)

The structure of a mask is static: it is hashable and part of the pytree structure. Data, such as segment ids, are leaves. The
first dimension of every leaf is B, or 1 if all rows share it.
Queries and keys are indexed by slot: the index in the row, or in the cache.
"""

import functools
import itertools
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp

from axlearn_core.errors import RequestError
from axlearn_core.nn.layer import Context

Range = tuple[int, int]
Role = Literal["rows", "queries", "keys"]
"""What an array of a mask has an item for: each row, each query of a row, or each key of a row."""

UNKNOWN_PREFIX = 2**30
"""`Mask.lookahead` of a mask whose prefix depends on data."""

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

    def roles(self) -> "Mask":
        """Return the mask with the `Role` of each array in place of the array.

        Raises:
            RequestError: The mask has arrays but does not define this method.
        """
        if jax.tree.leaves(self):
            raise RequestError(
                f"it is unknown which arrays of the mask {self.describe()!r} belong to queries, and which to keys\n"
                f"    got: {type(self).__name__} from {type(self).__module__}, without a method `roles`\n"
                "    fix: define `roles`, as `Segments` does, or combine the masks of this module"
            )
        return self

    def lookahead(self) -> float:
        """Return the number of leading keys that queries see before they reach them.

        It is 0 for a causal mask, the size of a prefix, `UNKNOWN_PREFIX`, or infinity if any later key may be visible.
        """
        return math.inf

    def reach(self) -> int | None:
        """Return how many of the last keys a query may see, including its own. None if there is no limit."""
        return None

    def first_slot(self, slot: Any) -> Any:
        """Return the first slot that a query at `slot` or later may see, or None if there is no limit."""
        return None

    def most_keys(self) -> int | None:
        """Return the maximum number of keys that a query sees, or None if the structure does not limit it."""
        return self.reach() if self.lookahead() == 0 else None

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
    return jnp.expand_dims(slots[..., part[0] : part[1]], -1 if axis == 1 else -2)


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

    def lookahead(self) -> float:
        """Return 0."""
        return 0


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

    def reach(self) -> int | None:
        """Return the size."""
        return self.size

    def first_slot(self, slot: Any) -> Any:
        """Return the first slot of the window."""
        return jnp.maximum(slot - self.size + 1, 0)


@_mask
class Chunks(Mask):
    """A mask that lets each query attend to only the keys of its own chunk of `size` positions.

    Combine the mask with `Causal` for the local attention of Llama 4. `chunked` builds the mask for the rows of a context.

    Attributes:
        size: Number of positions in a chunk.
        queries: First slot of the chunk of each query, int32 [B or 1, Q]. None means the multiple of `size` before it.
        keys: First slot of the chunk of each key, int32 [B or 1, K]. None means the multiple of `size` before it.
    """

    size: int = _static()
    queries: jax.Array | None = None
    keys: jax.Array | None = None

    def block(self, queries: Range, keys: Range) -> bool | None:
        """Compare the chunks of the corners, or their distance if the chunks depend on data."""
        first, last = queries[0], queries[1] - 1
        if self.queries is not None or self.keys is not None:
            return False if keys[1] - 1 <= first - self.size or keys[0] >= last + self.size else None
        chunks = {slot // self.size for slot in (first, last, keys[0], keys[1] - 1)}
        if len(chunks) == 1:
            return True
        return (
            False
            if (keys[1] - 1) // self.size < first // self.size or keys[0] // self.size > last // self.size
            else None
        )

    def materialize(self, queries, keys, query_slots=None, key_slots=None) -> jax.Array:
        """Return whether the chunks are equal."""
        query, key = (
            expand_slots(part, slots, axis) // self.size * self.size
            if first is None
            else expand_slots(part, first, axis)
            for part, slots, first, axis in ((queries, query_slots, self.queries, 1), (keys, key_slots, self.keys, 2))
        )
        return query == key

    def describe(self) -> str:
        """Describe the mask with its size, and `packed` if the chunks depend on data."""
        packed = ", packed" if self.queries is not None or self.keys is not None else ""
        return f"chunks({self.size}{packed})"

    def roles(self) -> Mask:
        """Return first slots of queries and of keys."""
        queries, keys = None if self.queries is None else "queries", None if self.keys is None else "keys"
        return Chunks(self.size, queries, keys)  # type: ignore[arg-type]

    def reach(self) -> int | None:
        """Return the chunk size, because the last query of a chunk sees the whole chunk."""
        return self.size

    def first_slot(self, slot: Any) -> Any:
        """Return the first slot of the chunk."""
        if self.queries is not None or self.keys is not None:
            return jnp.maximum(slot - self.size + 1, 0)
        return slot // self.size * self.size


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

    def roles(self) -> Mask:
        """Return ids of queries and of keys."""
        return Segments("queries", "keys")  # type: ignore[arg-type]


@_mask
class Prefix(Mask):
    """A mask that lets each query attend to only the first `length` keys of its row.

    A server cannot use it, because the length depends on data; see `FixedPrefix`.

    Attributes:
        length: int32 [B or 1].
    """

    length: jax.Array

    def materialize(self, queries, keys, query_slots=None, key_slots=None) -> jax.Array:
        """Return key < length."""
        visible = expand_slots(keys, key_slots, 2) < self.length[:, None, None]
        return jnp.broadcast_to(visible, (visible.shape[0], queries[1] - queries[0], visible.shape[2]))

    def roles(self) -> Mask:
        """Return lengths of rows."""
        return Prefix("rows")  # type: ignore[arg-type]

    def lookahead(self) -> float:
        """Return `UNKNOWN_PREFIX`."""
        return UNKNOWN_PREFIX


@_mask
class FixedPrefix(Mask):
    """A mask that lets each query attend to only the first `size` keys of its document.

    With `Causal() | FixedPrefix(size)`, the first `size` tokens attend to each other in both directions. In packed rows, combine
    it with `Segments`; `with_prefix` builds the mask for the rows of a context.

    Attributes:
        size: Number of tokens in the prefix.
        keys: Position of each key in its document, int32 [B or 1, K]. None means that it equals the slot.
    """

    size: int = _static()
    keys: jax.Array | None = None

    def block(self, queries: Range, keys: Range) -> bool | None:
        """Compare the keys with the size."""
        if self.keys is not None:
            return None
        return False if keys[0] >= self.size else True if keys[1] <= self.size else None

    def materialize(self, queries, keys, query_slots=None, key_slots=None) -> jax.Array:
        """Return key < size."""
        key = expand_slots(keys, key_slots, 2) if self.keys is None else self.keys[:, None, keys[0] : keys[1]]
        visible = key < self.size
        return jnp.broadcast_to(visible, (*visible.shape[:-2], queries[1] - queries[0], visible.shape[-1]))

    def describe(self) -> str:
        """Describe the mask with its size, and `packed` if it counts positions within documents."""
        return f"fixedprefix({self.size}{'' if self.keys is None else ', packed'})"

    def roles(self) -> Mask:
        """Return positions of keys."""
        return FixedPrefix(self.size, None if self.keys is None else "keys")  # type: ignore[arg-type]

    def lookahead(self) -> float:
        """Return the size, or `UNKNOWN_PREFIX` in packed rows."""
        return self.size if self.keys is None else UNKNOWN_PREFIX

    def most_keys(self) -> int | None:
        """Return the size, or None in packed rows."""
        return self.size if self.keys is None else None


@_mask
class SelectedKeys(Mask):
    """A mask that lets each query attend to only its own set of keys.

    An indexer chooses the sets in DeepSeek-V3.2. Combine the mask with `Causal`.

    Attributes:
        slots: Slots of the keys of each query, int32 [B or 1, Q, k], in any order. Negative slots select nothing, and repeated
            slots count once.
    """

    slots: jax.Array

    def materialize(self, queries, keys, query_slots=None, key_slots=None) -> jax.Array:
        """Return whether a query selects the slot of a key."""
        chosen = jnp.sort(self.slots[:, queries[0] : queries[1]], axis=-1)
        row = expand_slots(keys, key_slots, 2)[:, 0]
        rows = max(chosen.shape[0], row.shape[0])
        chosen, row = (jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in (chosen, row))
        search = jax.vmap(jax.vmap(jnp.searchsorted, (0, None)))
        index = jnp.minimum(search(chosen, row), chosen.shape[-1] - 1)
        return jnp.take_along_axis(chosen, index, axis=-1) == row[:, None]

    def describe(self) -> str:
        """Describe the mask with the number of keys per query."""
        return f"selectedkeys({self.slots.shape[-1]})"

    def roles(self) -> Mask:
        """Return slots of queries."""
        return SelectedKeys("queries")  # type: ignore[arg-type]

    def most_keys(self) -> int | None:
        """Return k."""
        return self.slots.shape[-1]


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

    def roles(self) -> Mask:
        """Return the roles of the parts."""
        return And(tuple(m.roles() for m in self.masks))

    def lookahead(self) -> float:
        """Return the smallest number."""
        return min(m.lookahead() for m in self.masks)

    def reach(self) -> int | None:
        """Return the smallest limit."""
        return min((n for m in self.masks if (n := m.reach()) is not None), default=None)

    def first_slot(self, slot: Any) -> Any:
        """Return the last of the first slots."""
        firsts = [n for m in self.masks if (n := m.first_slot(slot)) is not None]
        return None if not firsts else firsts[0] if len(firsts) == 1 else functools.reduce(jnp.maximum, firsts)

    def most_keys(self) -> int | None:
        """Return the smallest limit."""
        limits = [super().most_keys(), *(m.most_keys() for m in self.masks)]
        return min((n for n in limits if n is not None), default=None)


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

    def roles(self) -> Mask:
        """Return the roles of the parts."""
        return Or(tuple(m.roles() for m in self.masks))

    def lookahead(self) -> float:
        """Return the largest number."""
        return max(m.lookahead() for m in self.masks)

    def reach(self) -> int | None:
        """Return the largest limit, if all parts have one."""
        limits = [m.reach() for m in self.masks]
        return None if None in limits else max(n for n in limits if n is not None)

    def first_slot(self, slot: Any) -> Any:
        """Return the first of the first slots, if all parts have one."""
        firsts = [m.first_slot(slot) for m in self.masks]
        return None if any(n is None for n in firsts) else functools.reduce(jnp.minimum, firsts)

    def most_keys(self) -> int | None:
        """Return the sum of the limits, if all parts have one."""
        limits = [m.most_keys() for m in self.masks]
        total = None if None in limits else sum(n for n in limits if n is not None)
        own = super().most_keys()
        return min((n for n in (own, total) if n is not None), default=None)


def visible(context: Context, window: int | None = None, *, causal: bool = True) -> Mask:
    """Return the mask of a decoder.

    It is causal, with an optional window, the prefix and the documents of the context. Without `causal`, as in an
    encoder, queries also see all later keys. Combine it with another mask with `&`; see also `with_prefix`.
    """
    mask: Mask = Causal() if causal else Full()
    if window is not None:
        mask = mask & SlidingWindow(window)
    if context.prefix is not None:
        mask = mask | Prefix(context.prefix)
    return _within_documents(mask, context)


def _within_documents(mask: Mask, context: Context) -> Mask:
    """Return the mask, without keys of other documents."""
    ids = context.segment_ids
    return mask if ids is None else mask & Segments(ids, ids)


def with_prefix(context: Context, size: int) -> Mask:
    """Return the causal mask in which the first `size` tokens of each document attend in both directions."""
    packed = context.segment_ids is not None
    return _within_documents(Causal() | FixedPrefix(size, context.positions if packed else None), context)


def chunked(context: Context, size: int) -> Mask:
    """Return the mask of chunks of `size` positions, for the rows of a context.

    In packed rows, every document begins with a new chunk.
    """
    positions = context.positions
    if context.segment_ids is None or positions is None:
        return Chunks(size)
    first = jnp.arange(positions.shape[1], dtype=jnp.int32)[None] - positions % size
    return Chunks(size, first, first)


def window_size(mask: Mask) -> int | None:
    """Return the size of the smallest window of a mask, or None if it has no window."""
    return min((part.size for part in mask.parts if isinstance(part, SlidingWindow)), default=None)  # type: ignore[attr-defined]


def is_causal_window(mask: Mask) -> bool:
    """Return True if a mask is only causal, with or without windows."""
    parts = mask.parts
    return any(isinstance(p, Causal) for p in parts) and all(isinstance(p, Causal | SlidingWindow) for p in parts)


def visible_keys(mask: Mask, keys: int) -> float:
    """Return the share of the keys that the structure of a mask leaves visible to a query."""
    return min(1.0, (mask.most_keys() or keys) / keys)


def visible_pairs(mask: Mask, queries: int, keys: int) -> float:
    """Return the share of (query, key) pairs that a mask leaves visible, based on its structure.

    Partially visible blocks count as half. Parts that depend on data (segments, prefixes) count as if they hid nothing, except
    for blocks that they always hide and for a limit on the number of keys.
    """
    limit = mask.most_keys() or keys
    if queries != keys:
        return visible_keys(mask, keys)
    blocks = max(1, min(BLOCKS, queries))
    edges = [i * queries // blocks for i in range(blocks + 1)]
    ranges = list(itertools.pairwise(edges))
    pairs = 0.0
    for rows in ranges:
        row_pairs = 0.0
        for columns in ranges:
            # The block of a part that depends on data is unknown, which counts as visible.
            answers = [(part.block(rows, columns), jax.tree.leaves(part)) for part in mask.parts]
            hidden, unknown = (any(a is x and not (x is None and data) for a, data in answers) for x in (False, None))
            row_pairs += (0.0 if hidden else 0.5 if unknown else 1.0) * (rows[1] - rows[0]) * (columns[1] - columns[0])
        pairs += min(row_pairs, limit * (rows[1] - rows[0]))
    return pairs / (queries * keys)
