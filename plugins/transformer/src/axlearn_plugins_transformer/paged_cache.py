"""A cache of keys and values in pages (Kwon et al., 2023), for requests that are served together.

Legend: P pages of S slots, R requests of at most M pages, T new tokens, N query heads, G key-value heads, H head size.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from axlearn_core.config import Configurable, node, setting
from axlearn_core.errors import RequestError
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.masks import Causal, Mask, SlidingWindow
from axlearn_plugins_transformer.kernels.paged_attention import PagedAttentionOp, Split


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedSlots:
    """Where the new tokens of a step go: what `Context.slots` holds for a paged cache. T tokens stand in T rows of one.

    Attributes:
        table: int32 [R, M], the pages of each request in the order of its tokens.
        lengths: int32 [R], the tokens of each request, new ones included.
        write: int32 [T], page * S + slot of each new token; one beyond all pages writes nothing.
        split: how many new tokens each request has.
    """

    table: jax.Array
    lengths: jax.Array
    write: jax.Array
    split: Split = dataclasses.field(metadata={"static": True})

    @classmethod
    def of_rows(cls, slots: jax.Array, rows: int, pages: int, size: int) -> "PagedSlots":
        """The slots int32 [B or 1, C] of B rows that each own as many pages of `size`, one row's after another's."""
        each, count = pages // rows, slots.shape[1]
        slots = jnp.broadcast_to(slots, (rows, count))
        write = jnp.arange(rows, dtype=jnp.int32)[:, None] * (each * size) + slots
        return cls(
            table=jnp.arange(rows * each, dtype=jnp.int32).reshape(rows, each),
            lengths=slots[:, -1] + 1,
            write=write.reshape(-1),
            split=Split(singles=rows if count == 1 else 0, chunk=count),
        )

    def starts(self) -> jax.Array:
        """int32 [R + 1], where along T the tokens of each request begin."""
        singles, chunk = self.split.singles, self.split.chunk
        rest = self.table.shape[0] - singles
        return jnp.concatenate(
            [jnp.arange(singles, dtype=jnp.int32), singles + chunk * jnp.arange(rest + 1, dtype=jnp.int32)]
        )


def window_size(mask: Mask, layout: str) -> int | None:
    """The last keys that a causal mask shows; None where it shows all before the query.

    Raises:
        RequestError: the mask is another one.
    """
    causal = any(isinstance(part, Causal) for part in mask.parts)
    other_masks = [part for part in mask.parts if not isinstance(part, Causal)]
    if not causal or any(not isinstance(part, SlidingWindow) for part in other_masks):
        raise RequestError(
            f"the cache layout {layout} cannot attend under this mask\n"
            f"    got: {mask.describe()}\n"
            "    expected: causal attention, with a sliding window or without\n"
            "    fix: serve a causal decoder, and leave out prefixes and segments"
        )
    return min((part.size for part in other_masks), default=None)  # type: ignore[attr-defined]


LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The largest numbers of the narrow dtypes."""


def to_narrow(x: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """[..., H] -> the numbers in a narrow dtype, and a scale float32 [...] for each vector: its largest number is theirs."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / LARGEST[dtype]
    scaled = x / jnp.where(scale > 0, scale, 1.0)[..., None]
    return (jnp.round(scaled) if dtype == "int8" else scaled).astype(dtype), scale


def write_slots(pages: jax.Array, new: jax.Array, write: jax.Array, *, heads_first: bool = False) -> jax.Array:
    """[P, S, ...] (or [P, 2, G, S, H]) with [T, ...] at the slots int32 [T]; those beyond all pages are dropped."""
    size, new = pages.shape[3 if heads_first else 1], new.astype(pages.dtype)
    at = (write // size, slice(None), slice(None), write % size) if heads_first else (write // size, write % size)
    return pages.at[at].set(new, mode="drop")


class PagedCache(Configurable):
    """Pages that any request can own, and attention by the op `paged_attention`.

    `Context.slots` is a `PagedSlots`, for tokens in rows of one; with plain slots each row owns equally many pages.
    """

    @node
    class Config(Configurable.Config["PagedCache"]):
        """`page_size` is how many tokens a page has room for.

        `heads_first` stores pages as [P, 2, G, S, H] and not as [P, S, 2 G, H]: faster on CPUs; no kernel of TPUs takes it.
        `store` is the dtype of the pages, with a float32 scale for each token and head; None stores what was computed.
        """

        page_size: int = setting(default=16, ge=1)
        heads_first: bool = False
        store: Literal["int8", "float8_e4m3fn"] | None = None

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def init(self, batch: int, length: int, num_kv_heads: int, head_dim: int, dtype: str) -> dict[str, jax.Array]:
        """Pages for `batch` rows of `length` tokens: [P, S, 2 G, H], of head g the keys at 2 g and the values at 2 g + 1."""
        size = self.cfg.page_size
        inner = (2, num_kv_heads, size) if self.cfg.heads_first else (size, 2 * num_kv_heads)
        shape, store = (batch * -(-length // size), *inner), self.cfg.store
        pages = self._place(jnp.zeros((*shape, head_dim), store or dtype))
        return {"pages": pages} if store is None else {"pages": pages, "scales": self._place(jnp.zeros(shape), -1)}

    def _place(self, array: jax.Array, last: int = 0) -> jax.Array:
        """On the devices of its heads; `last` is -1 for an array without the dimension H."""
        axes = (
            (None, None, "activation_kv", None, None) if self.cfg.heads_first else (None, None, "activation_kv", None)
        )
        return constrain(array, *axes[: len(axes) + last])

    def attend(
        self, cache: dict[str, jax.Array], op: AttentionOp, slots: Any, kernel: str | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """See `KVCache`; `slots` may be a `PagedSlots`."""
        window = window_size(op.mask, "paged")
        pages, shape, heads_first = cache["pages"], op.query.shape, self.cfg.heads_first
        if not isinstance(slots, PagedSlots):
            slots = PagedSlots.of_rows(slots, shape[0], pages.shape[0], self.cfg.page_size)
        query, key, value = (x.reshape(-1, *x.shape[2:]) for x in (op.query, op.key, op.value))
        new = jnp.stack([key, value.astype(key.dtype)], axis=1 if heads_first else 2)
        # Pages stay finite, so that no request meets infinities that another one left behind.
        new = jnp.where(jnp.isfinite(new), new, 0)
        new = new if heads_first else new.reshape(key.shape[0], -1, key.shape[2])
        cache = self._write(cache, new, slots.write)
        result = PagedAttentionOp(
            query,
            cache["pages"],
            slots.table,
            slots.lengths,
            slots.starts(),
            jnp.full((1,), slots.table.shape[0], jnp.int32),
            scale=op.scale,
            window=window,
            softcap=op.softcap,
            bias=op.bias,
            heads_first=heads_first,
            scales=cache.get("scales"),
            finite=True,
            split=slots.split,
        ).run(kernel)
        return result.reshape(*shape[:-1], -1).astype(op.value.dtype), cache

    def _write(self, cache: dict[str, jax.Array], new: jax.Array, write: jax.Array) -> dict[str, jax.Array]:
        heads_first = self.cfg.heads_first
        if self.cfg.store is None:
            return {"pages": self._place(write_slots(cache["pages"], new, write, heads_first=heads_first))}
        narrow, scale = to_narrow(new, self.cfg.store)
        pages = write_slots(cache["pages"], narrow, write, heads_first=heads_first)
        scales = write_slots(cache["scales"], scale, write, heads_first=heads_first)
        return {"pages": self._place(pages), "scales": self._place(scales, -1)}
