"""The functions that create a paged cache and copy, read and write its blocks."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_core.compose import Array, Function
from axlearn_core.errors import RequestError
from axlearn_plugins_serving.token_records import read_pages
from axlearn_plugins_transformer.cache_spec import CacheEntry


class CacheFunctions:
    """The functions of a paged cache."""

    def __init__(self, spec: Any, *, blocks: int, requests: int, blocks_per_call: int):
        """Build the functions of a cache.

        Args:
            spec: Entries of the cache; see `axlearn_plugins_transformer.cache_spec`.
            blocks: Number of blocks.
            requests: Number of entries that belong to a request, such as recurrent states.
            blocks_per_call: Number of blocks that one call copies, reads or writes.

        Raises:
            RequestError: An entry belongs neither to pages nor to requests.
        """
        _check_kinds(spec)
        self._spec, self._blocks, self._requests, self._blocks_per_call = spec, blocks, requests, blocks_per_call

    def declare(self) -> Mapping[str, Function]:
        """Return the function that creates an empty cache, by name."""
        function = Function(call=self._build_cache, takes_model=False, runs_once=True, describe="an empty cache")
        return {"serve_cache": function}

    def declare_steps(self, cache: Any) -> Mapping[str, Function]:
        """Return the functions that copy, read and write blocks, by name.

        `cache` is the output of `serve_cache`, abstract and with shardings.
        """
        ids = Array((self._blocks_per_call,), jnp.int32)
        contents = jax.tree.map(
            lambda s: Array(s.shape, s.dtype),
            jax.eval_shape(self._read_pages, cache, jax.ShapeDtypeStruct(ids.shape, ids.dtype)),
        )
        return {
            "serve_copy": Function(
                call=lambda cache, source, target: self._map_pages(
                    lambda x: x.at[target].set(x.at[source].get(mode="clip"), mode="drop"), cache
                ),
                inputs=lambda _: (cache, ids, ids),
                outputs=lambda _: cache,
                donate=(0,),
                takes_model=False,
                describe="copy cache blocks",
            ),
            "serve_read": Function(
                call=self._read_pages,
                inputs=lambda _: (cache, ids),
                takes_model=False,
                describe="read blocks",
            ),
            "serve_records": Function(
                call=lambda cache, source: read_pages(self._spec, cache, source),
                inputs=lambda _: (cache, ids),
                takes_model=False,
                describe="read the records of blocks",
            ),
            "serve_write": Function(
                call=lambda cache, target, contents: self._map_pages(
                    lambda x, new: x.at[target].set(new, mode="drop"), cache, contents
                ),
                inputs=lambda _: (cache, ids, contents),
                outputs=lambda _: cache,
                donate=(0,),
                takes_model=False,
                describe="write blocks",
            ),
        }

    def _build_cache(self) -> Any:
        leading = {"page": (self._blocks,), "request": (self._requests,)}
        return jax.tree.map(lambda entry: entry.empty(leading[entry.per]), self._spec)

    def _map_pages(self, change: Callable[..., jax.Array], cache: Any, *others: Sequence[Any]) -> Any:
        """Replace the arrays of a cache that have a leading axis of blocks.

        `others` are sequences with an item for each of these arrays. If several layers share an array, `change` sees the blocks of
        one layer.
        """
        items = iter(zip(*others, strict=True)) if others else itertools.repeat(())

        def change_entry(entry: CacheEntry, x: Any) -> Any:
            if entry.per != "page":
                return x
            arguments = next(items)
            run = change if entry.layers is None else jax.vmap(change, in_axes=(0, *(1,) * len(arguments)))
            return run(x, *arguments)

        return jax.tree.map(change_entry, self._spec, cache)

    def _read_pages(self, cache: Any, source: jax.Array) -> tuple[jax.Array, ...]:
        """Return the blocks `source`, int32 [N], of each array with blocks: [N, ...], or [N, layers, ...]."""

        def read(x: jax.Array) -> jax.Array:
            return x.at[source].get(mode="clip")

        arrays = zip(jax.tree.leaves(self._spec), jax.tree.leaves(cache), strict=True)
        return tuple(
            read(x) if entry.layers is None else jax.vmap(read, out_axes=1)(x)
            for entry, x in arrays
            if entry.per == "page"
        )


def _check_kinds(spec: Any) -> None:
    for path, entry in jax.tree_util.tree_leaves_with_path(spec):
        if entry.per not in ("page", "request"):
            raise RequestError(
                f"a server cannot keep the cache of layer {jax.tree_util.keystr(path[:1], simple=True)}\n    got: {entry}\n"
                "    expected: entries per page or per request\n"
                "    fix: keep keys and values in a slot `Node[KVCache]`, which a server fills with pages, or declare pages"
            )
