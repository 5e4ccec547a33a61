"""A paged cache of latents, for requests that are served together."""

from typing import Any

import jax
import jax.numpy as jnp

from axlearn_core.config import Configurable, node, setting
from axlearn_core.errors import RequestError
from axlearn_plugins_transformer.attention_variants.latent_cache import LatentAttentionOp, ReadLatents, SeenLatents
from axlearn_plugins_transformer.cache_spec import CacheEntry
from axlearn_plugins_transformer.kernels.paged_attention import TOKEN_BATCH, PagedAttentionOp
from axlearn_plugins_transformer.paged_cache import PagedSlots, paged_mask, write_slots


class PagedLatentCache(Configurable):
    """Latents in pages that any request can own.

    Attention reads them as the keys of a single head.

    For rows of one token, `Context.slots` is a `PagedSlots`. With plain slots, each row owns the same number of pages.
    """

    @node
    class Config(Configurable.Config["PagedLatentCache"]):
        """Settings for the pages.

        Attributes:
            page_size: Tokens per page.
        """

        page_size: int = setting(default=16, ge=1)

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def spec(self, dim: int, dtype: str, window: int | None = None) -> dict[str, CacheEntry]:
        """Return the entry of the pages, [S, L]. They are replicated across devices."""
        size = self.cfg.page_size
        return {"pages": CacheEntry(per="page", shape=(size, dim), dtype=dtype, page_size=size, window=window)}

    def attend(
        self,
        cache: dict[str, jax.Array],
        latents: jax.Array,
        slots: Any,
        attention: LatentAttentionOp,
        kernel: str | None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Write the new latents and attend; see `LatentCache`.

        `slots` may be a `PagedSlots`.
        """
        pages, (rows, count, dim) = cache["pages"], latents.shape
        if not isinstance(slots, PagedSlots):
            return self._attend_rows(pages, latents, slots, attention, kernel)
        pages = write_slots(pages, latents.reshape(-1, dim), slots.write)
        # Call `attention` with the new latents only, to get the queries in the latent space.
        op = attention(SeenLatents(latents, jnp.zeros((1, count), jnp.int32)))
        query = op.query.reshape(-1, *op.query.shape[2:])
        if query.shape[-1] != dim:  # the last element multiplies a bias, which is equal for all keys of a query
            if op.softcap is not None or op.sinks is not None:
                other = "a softcap" if op.softcap is not None else "sinks"
                raise RequestError(
                    f"the cache layout paged-latent does not support a key bias together with {other}\n"
                    f"    fix: leave out the bias of `key`, or {other}"
                )
            query = query[..., :dim]
        result = PagedAttentionOp(
            query,
            pages[:, :, None],
            slots.table,
            slots.lengths,
            slots.starts(),
            jnp.full((1,), slots.table.shape[0], jnp.int32),
            scale=op.scale,
            mask=paged_mask(op.mask, slots, op.query.shape, "paged-latent"),
            softcap=op.softcap,
            bias=op.bias,
            sinks=op.sinks,
            value_size=op.value.shape[-1],
            split=slots.split,
        ).run(kernel)
        return result.reshape(rows, count, *result.shape[1:]).astype(op.value.dtype), {"pages": pages}

    def write(
        self, cache: dict[str, jax.Array], latents: jax.Array, slots: Any
    ) -> tuple[dict[str, jax.Array], ReadLatents]:
        """Write the new latents; see `LatentCache`. `slots` may be a `PagedSlots`. Each row then has pages of its own."""
        pages, (rows, _, dim) = cache["pages"], latents.shape
        paged = isinstance(slots, PagedSlots)
        placed = slots if paged else PagedSlots.from_slots(slots, rows, pages.shape[0], pages.shape[1])
        pages = write_slots(pages, latents.reshape(-1, dim), placed.write)
        requests = placed.table.shape[0]
        owner = jnp.searchsorted(placed.starts()[1:], jnp.arange(rows), side="right") if paged else jnp.arange(rows)
        table = placed.table[jnp.minimum(owner, requests - 1)]

        def read(row: jax.Array) -> tuple[jax.Array, jax.Array]:
            latents = pages.at[table[row]].get(mode="clip").reshape(*row.shape, -1, dim)
            return latents, jnp.arange(latents.shape[1], dtype=jnp.int32)[None]

        return {"pages": pages}, ReadLatents(read, TOKEN_BATCH if paged else None)

    @staticmethod
    def _attend_rows(
        pages: jax.Array, latents: jax.Array, slots: jax.Array, attention: LatentAttentionOp, kernel: str | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Attend over all slots of each row.

        The pages of a row are consecutive. The layer builds the op.
        """
        rows, _, dim = latents.shape
        write = PagedSlots.from_slots(slots, rows, pages.shape[0], pages.shape[1]).write
        pages = write_slots(pages, latents.reshape(-1, dim), write)
        all_latents = pages.reshape(rows, -1, dim)
        result = attention(SeenLatents(all_latents, jnp.arange(all_latents.shape[1], dtype=jnp.int32)[None])).run(
            kernel
        )
        return result, {"pages": pages}
