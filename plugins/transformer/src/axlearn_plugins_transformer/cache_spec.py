"""Declarations of the arrays that a layer keeps between calls, and the arrays themselves.

A layer declares its cache in `cache_spec()`, as a pytree of `CacheEntry`. Whoever runs the layer allocates the arrays: generation
gives each row its own, and a serving engine keeps one pool of pages and one of recurrent states for all requests.
"""

from typing import Any, Literal, Protocol, runtime_checkable

import attrs
import jax
import jax.numpy as jnp

from axlearn_core.errors import RequestError
from axlearn_core.nn.sharding import constrain

KINDS = ("token", "page", "request")
"""Values of `CacheEntry.per`."""


@attrs.frozen(kw_only=True)
class CacheEntry:
    """One array of a layer's cache.

    Attributes:
        per: What an item of the array belongs to. A `token` and a `page` of tokens are written once. The item of a `request` (a
            row) is a state that every call replaces; it is zero before the first token.
        shape: Shape of an item.
        dtype: Dtype of the array.
        axes: Logical axis names of `shape`; empty if devices keep copies.
        page_size: Tokens per page, if `per` is `page`.
        window: Number of tokens, including the current one, that the layer reads. Older items may be discarded. None if it reads
            all of them. With attention in chunks, it is the size of a chunk.
        prefix: Number of leading tokens that attend in both directions. One call must contain all of them, and they depend on
            each other.
        record: Name of the facts about tokens that the array holds, such as `experts`. The layer only writes them, and an engine
            returns them if a request asks for its records. None if the layer reads the array.
        layers: Number of layers that share the array, which then has a leading dimension of layers. None for one layer.

    Raises:
        RequestError: A value is not possible.
    """

    per: Literal["token", "page", "request"]
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...] = ()
    page_size: int = 1
    window: int | None = None
    prefix: int = 0
    record: str | None = None
    layers: int | None = None

    def __attrs_post_init__(self) -> None:
        positive = "a positive number"
        checks = [
            ("per", self.per, self.per in KINDS, f"one of {', '.join(KINDS)}"),
            ("shape", self.shape, all(size > 0 for size in self.shape), "positive sizes"),
            ("dtype", self.dtype, _is_dtype(self.dtype), "the name of a dtype, such as float32"),
            (
                "axes",
                self.axes,
                len(self.axes) in (0, len(self.shape)),
                f"a name for each size of {self.shape}, or none",
            ),
            ("page_size", self.page_size, self.page_size > 0, positive),
            ("window", self.window, self.window is None or self.window > 0, positive),
            ("prefix", self.prefix, self.prefix >= 0, "a number of tokens"),
            ("layers", self.layers, self.layers is None or self.layers > 0, positive),
        ]
        for name, value, is_possible, expected in checks:
            if not is_possible:
                raise RequestError(
                    f"CacheEntry.{name}: not possible\n    got: {value!r}\n    expected: {expected}\n"
                    "    fix: correct the layer's `cache_spec`"
                )

    def leading(self, rows: int, length: int) -> tuple[int, ...]:
        """Return the leading dimensions of the array for `rows` rows of at most `length` tokens."""
        if self.per == "token":
            return rows, length
        return (rows * -(-length // self.page_size),) if self.per == "page" else (rows,)

    def empty(self, leading: tuple[int, ...]) -> jax.Array:
        """Return an array of zeros, [*leading, *shape], or [layers, *leading, *shape], sharded by `axes`."""
        leading = leading if self.layers is None else (self.layers, *leading)
        array = jnp.zeros((*leading, *self.shape), self.dtype)
        return constrain(array, *(None,) * len(leading), *self.axes) if self.axes else array


@runtime_checkable
class KeepsCache(Protocol):
    """A layer that keeps arrays between calls."""

    def cache_spec(self) -> Any:
        """Return a pytree of `CacheEntry`. The layer's cache has the same structure, with an array for each entry."""
        ...


def spec_of(layer: object) -> Any:
    """Return the entries of a layer's cache.

    Raises:
        RequestError: The layer does not declare a cache.
    """
    if not isinstance(layer, KeepsCache):
        raise RequestError(
            f"{type(layer).__name__} cannot generate text: it has no method `cache_spec`\n"
            f"    got: a layer from {type(layer).__module__}\n"
            "    expected: a method that returns the entries of the layer's cache\n"
            f"    fix: see `KeepsCache` in {__name__}, which replaces `init_cache`"
        )
    return layer.cache_spec()


def check_returned(layer: object, cache: Any, returned: Any) -> None:
    """Check that a layer returned arrays like those of its cache.

    Raises:
        RequestError: The structure, a shape or a dtype differs.
    """
    expected, actual = (jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree) for tree in (cache, returned))
    if expected != actual:
        raise RequestError(
            f"{type(layer).__name__} returned a cache with other arrays than it declares\n    got: {actual}\n"
            f"    expected: {expected}, as `cache_spec` declares\n"
            f"    fix: correct the result or `cache_spec` of the class, in {type(layer).__module__}"
        )


def empty_cache(spec: Any, rows: int, length: int) -> Any:
    """Return an empty cache with the entries of a spec, for `rows` rows of at most `length` tokens."""
    return jax.tree.map(lambda entry: entry.empty(entry.leading(rows, length)), spec)


def read_window(spec: Any) -> int | None:
    """Return how many tokens, including the current one, the layers of a spec read from their caches of tokens.

    Returns None if a layer reads all tokens, or no layer keeps tokens.
    """
    windows = [entry.window for entry in jax.tree.leaves(spec) if entry.per != "request"]
    sizes = [window for window in windows if window is not None]
    return max(sizes) if windows and len(sizes) == len(windows) else None


def read_prefix(spec: Any) -> int:
    """Return the number of leading tokens that one call must contain; 0 if there is no such limit."""
    return max((entry.prefix for entry in jax.tree.leaves(spec)), default=0)


def check_prefix(length: int, prefix: int) -> None:
    """Check that a prompt of `length` tokens contains the prefix that attends in both directions.

    Raises:
        RequestError: If it does not, so that later tokens would change the keys of earlier ones.
    """
    if length < prefix:
        raise RequestError(
            f"the prompt has {length} tokens, but the first {prefix} tokens attend to each other in both directions\n"
            f"    expected: at least {prefix}\n    fix: use a longer prompt"
        )


def _is_dtype(name: str) -> bool:
    try:
        jnp.dtype(name)
    except TypeError:
        return False
    return True


def has_states(spec: Any) -> bool:
    """Return True if a layer of a spec keeps a recurrent state."""
    return any(entry.per == "request" for entry in jax.tree.leaves(spec))
