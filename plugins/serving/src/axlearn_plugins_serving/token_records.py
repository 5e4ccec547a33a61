"""Records that layers keep in their caches for each token, such as the experts of routers; see `CacheEntry.record`."""

from typing import Any

import jax
import jax.numpy as jnp


def list_records(spec: Any) -> tuple[str, ...]:
    """Return the names of the records of a cache with the entries `spec`."""
    return tuple(dict.fromkeys(entry.record for entry in jax.tree.leaves(spec) if entry.record is not None))


def read_pages(spec: Any, cache: Any, source: jax.Array) -> dict[str, jax.Array]:
    """Return the records of pages by name, [N, page_size, L, ...] for L layers.

    Args:
        spec: Entries of the cache.
        cache: The cache.
        source: Pages, int32 [N].
    """
    parts_by_name: dict[str, list[jax.Array]] = {name: [] for name in list_records(spec)}
    for entry, x in zip(jax.tree.leaves(spec), jax.tree.leaves(cache), strict=True):
        if entry.record is not None:
            layers = x if entry.layers is not None else x[None]
            parts_by_name[entry.record].append(layers.at[:, source].get(mode="clip"))
    return {name: jnp.moveaxis(jnp.concatenate(parts), 0, 2) for name, parts in parts_by_name.items()}
