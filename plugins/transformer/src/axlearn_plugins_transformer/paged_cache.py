"""A paged cache of keys and values, for requests that are served together.

See Kwon et al., 2023.

Legend: P pages of S slots, R requests of at most M pages, T new tokens, N query heads, G key-value heads, H head size.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from axlearn_core.config import Configurable, node, setting
from axlearn_core.errors import RequestError
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_transformer.cache_spec import CacheEntry
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.mask_arrays import separate_queries
from axlearn_plugins_transformer.kernels.masks import UNKNOWN_PREFIX, Mask
from axlearn_plugins_transformer.kernels.paged_attention import PagedAttentionOp, Split
from axlearn_plugins_transformer.recurrence import StateRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedSlots:
    """The slots for the new tokens of a step, passed as `Context.slots`.

    Each of the T tokens is a separate row.

    Attributes:
        table: Pages of each request in token order, int32 [R, M].
        lengths: Number of tokens in each request, including the new ones, int32 [R].
        write: Destination `page * S + slot` of each new token, int32 [T]. Tokens with an index after the last page are dropped.
        split: Number of new tokens per request.
        pages: Number of pages, P.
        page_size: Slots per page, S.
        states: Rows of recurrent states, for models that have them.
    """

    table: jax.Array
    lengths: jax.Array
    write: jax.Array
    split: Split = dataclasses.field(metadata={"static": True})
    pages: int = dataclasses.field(metadata={"static": True})
    page_size: int = dataclasses.field(metadata={"static": True})
    states: StateRows | None = None

    @classmethod
    def from_slots(cls, slots: jax.Array, rows: int, pages: int, size: int) -> "PagedSlots":
        """Convert the slots, int32 [B or 1, C], of rows to paged slots.

        Each of the B rows owns the same number of consecutive pages of `size` slots.
        """
        pages_per_row, count = pages // rows, slots.shape[1]
        slots = jnp.broadcast_to(slots, (rows, count))
        write = jnp.arange(rows, dtype=jnp.int32)[:, None] * (pages_per_row * size) + slots
        return cls(
            table=jnp.arange(rows * pages_per_row, dtype=jnp.int32).reshape(rows, pages_per_row),
            lengths=slots[:, -1] + 1,
            write=write.reshape(-1),
            split=Split(singles=rows if count == 1 else 0, chunk=count),
            pages=pages,
            page_size=size,
        )

    def select_layer(self, layer: jax.Array, layers: int) -> "PagedSlots":
        """Return the slots in the pages of one of several layers; see `SelectsLayer`."""
        size = self.pages * self.page_size
        write = jnp.where(self.write < size, self.write + layer * size, layers * size)
        return dataclasses.replace(self, table=self.table + layer * self.pages, write=write, pages=layers * self.pages)

    def starts(self) -> jax.Array:
        """Return the index of each request's first new token, int32 [R + 1]."""
        singles, chunk = self.split.singles, self.split.chunk
        chunked = self.table.shape[0] - singles
        return jnp.concatenate(
            [jnp.arange(singles, dtype=jnp.int32), singles + chunk * jnp.arange(chunked + 1, dtype=jnp.int32)]
        )


def paged_mask(mask: Mask, slots: Any, shape: tuple[int, ...], layout: str) -> Mask:
    """Return the mask of `PagedAttentionOp` for the new tokens of a call.

    Args:
        mask: Mask for B rows of S queries.
        slots: `PagedSlots`, or the slots of the rows, int32 [B or 1, S].
        shape: Shape of the queries, [B, S, ...].
        layout: Name of the layout in errors.

    Raises:
        RequestError: Queries would see keys that a later call writes.
    """
    unknown = UNKNOWN_PREFIX if isinstance(slots, PagedSlots) else math.inf
    if mask.lookahead() >= unknown:
        raise RequestError(
            f"the cache layout {layout} cannot attend under this mask\n"
            f"    got: {mask.describe()}\n"
            "    expected: a mask that hides later keys, except for those of a prefix of fixed size\n"
            "    fix: serve a causal decoder, and use FixedPrefix instead of Prefix"
        )
    return separate_queries(mask, *shape[:2])


LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Largest finite value of each narrow dtype."""


def quantize_vectors(x: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Quantize vectors [..., H] to a narrow dtype.

    Return the quantized vectors, and a float32 scale for each, [...].
    """
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / LARGEST[dtype]
    scaled = x / jnp.where(scale > 0, scale, 1.0)[..., None]
    return (jnp.round(scaled) if dtype == "int8" else scaled).astype(dtype), scale


def write_slots(pages: jax.Array, new: jax.Array, write: jax.Array, *, heads_first: bool = False) -> jax.Array:
    """Write [T, ...] to the slots int32 [T] of pages [P, S, ...] or [P, 2, G, S, H].

    Values for slots after the last page are dropped.
    """
    size, new = pages.shape[3 if heads_first else 1], new.astype(pages.dtype)
    index = (write // size, slice(None), slice(None), write % size) if heads_first else (write // size, write % size)
    return pages.at[index].set(new, mode="drop")


class PagedCache(Configurable):
    """Keys and values in pages that any request can own.

    Attention uses the `paged_attention` op.

    `Context.slots` is a `PagedSlots` for rows of one token. With plain slots, each row owns the same number of pages.
    """

    @node
    class Config(Configurable.Config["PagedCache"]):
        """Settings for the pages.

        Attributes:
            page_size: Tokens per page.
            heads_first: Store pages as [P, 2, G, S, H] instead of [P, S, 2 G, H]. This is faster on CPUs, but no TPU
                kernel supports it.
            store: Dtype of the pages, with a float32 scale per token and head. None stores the computed dtype.
        """

        page_size: int = setting(default=16, ge=1)
        heads_first: bool = False
        store: Literal["int8", "float8_e4m3fn"] | None = None

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def spec(self, num_kv_heads: int, head_dim: int, dtype: str, window: int | None = None) -> dict[str, CacheEntry]:
        """Return the entries of the pages, [S, 2 G, H], and of the scales.

        The keys of head g are at index 2 g, and its values at 2 g + 1.
        """
        size, store = self.cfg.page_size, self.cfg.store
        shape = (2, num_kv_heads, size) if self.cfg.heads_first else (size, 2 * num_kv_heads)
        kind: dict[str, Any] = {"per": "page", "page_size": size, "window": window}
        axes = self._axes[1:]
        pages = {"pages": CacheEntry(shape=(*shape, head_dim), dtype=store or dtype, axes=axes, **kind)}
        return (
            pages
            if store is None
            else {**pages, "scales": CacheEntry(shape=shape, dtype="float32", axes=axes[:-1], **kind)}
        )

    @property
    def _axes(self) -> tuple[str | None, ...]:
        """Logical axes of the pages."""
        heads = "activation_kv"
        return (None, None, heads, None, None) if self.cfg.heads_first else (None, None, heads, None)

    def _place(self, array: jax.Array, last: int = 0) -> jax.Array:
        """Shard an array by heads.

        `last` is -1 if the array does not have the dimension H.
        """
        return constrain(array, *self._axes[: len(self._axes) + last])

    def attend(
        self, cache: dict[str, jax.Array], op: AttentionOp, slots: Any, kernel: str | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Write the new tokens and attend; see `KVCache`. `slots` may be a `PagedSlots`."""
        mask, slots = self._locate(cache, op, slots)
        heads_first = self.cfg.heads_first
        query, key, value = (x.reshape(-1, *x.shape[2:]) for x in (op.query, op.key, op.value))
        value = self._pad_values(value.astype(key.dtype), key.shape[-1])
        new = jnp.stack([key, value], axis=1 if heads_first else 2)
        # Store finite values only; otherwise a request could read infinities that an earlier owner of the page wrote.
        new = jnp.where(jnp.isfinite(new), new, 0)
        new = new if heads_first else new.reshape(key.shape[0], -1, key.shape[2])
        cache = self._write(cache, new, slots.write)
        return self._attend(cache, op, query, mask, slots, kernel), cache

    def _pad_values(self, value: jax.Array, size: int) -> jax.Array:
        """Pad values [T, G, V] to the size of the keys."""
        if value.shape[-1] == size:
            return value
        if not self.cfg.heads_first or value.shape[-1] > size:
            raise RequestError(
                f"the cache layout paged-cache cannot store values of size {value.shape[-1]} beside keys of size {size}\n"
                "    expected: values of the same size, or smaller ones with heads_first"
            )
        return jnp.pad(value, ((0, 0), (0, 0), (0, size - value.shape[-1])))

    def read(self, cache: dict[str, jax.Array], op: AttentionOp, slots: Any, kernel: str | None) -> jax.Array:
        """Attend to tokens that have been written; see `KVCache`."""
        mask, slots = self._locate(cache, op, slots)
        return self._attend(cache, op, op.query.reshape(-1, *op.query.shape[2:]), mask, slots, kernel)

    def _locate(self, cache: dict[str, jax.Array], op: AttentionOp, slots: Any) -> tuple[Mask, PagedSlots]:
        """Return the mask of single tokens, and their paged slots."""
        mask = paged_mask(op.mask, slots, op.query.shape, "paged")
        if not isinstance(slots, PagedSlots):
            slots = PagedSlots.from_slots(slots, op.query.shape[0], cache["pages"].shape[0], self.cfg.page_size)
        return mask, slots

    def _attend(
        self,
        cache: dict[str, jax.Array],
        op: AttentionOp,
        query: jax.Array,
        mask: Mask,
        slots: PagedSlots,
        kernel: str | None,
    ) -> jax.Array:
        """Attend to pages: [T, N, H] -> [B, S, N, H]."""
        result = PagedAttentionOp(
            query,
            cache["pages"],
            slots.table,
            slots.lengths,
            slots.starts(),
            jnp.full((1,), slots.table.shape[0], jnp.int32),
            scale=op.scale,
            mask=mask,
            softcap=op.softcap,
            bias=op.bias,
            sinks=op.sinks,
            heads_first=self.cfg.heads_first,
            scales=cache.get("scales"),
            finite=True,
            split=slots.split,
            value_size=None if op.value.shape[-1] == op.query.shape[-1] else op.value.shape[-1],
        ).run(kernel)
        return result.reshape(*op.query.shape[:-1], -1).astype(op.value.dtype)

    def _write(self, cache: dict[str, jax.Array], new: jax.Array, write: jax.Array) -> dict[str, jax.Array]:
        heads_first = self.cfg.heads_first
        if self.cfg.store is None:
            return {"pages": self._place(write_slots(cache["pages"], new, write, heads_first=heads_first))}
        narrow, scale = quantize_vectors(new, self.cfg.store)
        pages = write_slots(cache["pages"], narrow, write, heads_first=heads_first)
        scales = write_slots(cache["scales"], scale, write, heads_first=heads_first)
        return {"pages": self._place(pages), "scales": self._place(scales, -1)}
