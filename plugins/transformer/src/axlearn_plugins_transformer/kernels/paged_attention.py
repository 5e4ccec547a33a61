"""The op `paged_attention`: tokens of many requests over keys and values in pages (Kwon et al., 2023), for serving.

Requests that are being read (prefill) and requests that are being answered (decoding) go together: each has as many queries as it
has new tokens, one after another along one axis, and no row is padded.

T tokens, N query heads, G key-value heads (N is a multiple of G), H head size, P pages of S slots, R requests of at most M pages.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.kernels.op import Op, Shape
from axlearn_plugins_transformer.kernels.bias import Bias
from axlearn_plugins_transformer.kernels.per_device import parts_of, per_device

AT_ONCE = 64
"""Tokens whose keys the reference gathers at one time."""


class Split(NamedTuple):
    """How the new tokens are divided among requests, where that is known when the program is compiled.

    Attributes:
        singles: the first requests, which have one token each.
        chunk: the tokens of each of the others.
    """

    singles: int
    chunk: int


@attrs.frozen(eq=False)
class PagedAttentionOp(Op[jax.Array]):
    """softmax(mask(cap(scale * query @ key))) @ value under a causal mask, the softmax in float32. It has no derivative.

    The result is [T, N, H] (with `value_size` [T, N, value_size]) in the dtype of the queries. Rows of tokens that no request has
    are not specified.

    Attributes:
        query: [T, N, H], the new tokens of request 0, then those of request 1, and so on; what is behind the last is not used.
        pages: [P, S, 2 G, H], of head g the keys at 2 g and the values at 2 g + 1. Those of the new tokens are in them.
            With `value_size` [P, S, G, H]: the keys alone.
        table: int32 [R, M], the pages of each request in the order of its tokens. Unused entries hold anything.
        lengths: int32 [R], the tokens of each request, new ones included.
        starts: int32 [R + 1], where along T the new tokens of each request begin; the last entry is where they all end.
        count: int32 [1], how many requests there are; what is behind them in the other arrays is not used.
        scale: multiplies the queries.
        window: the last keys that a query sees; None without a limit.
        softcap: caps the scores to (-softcap, softcap) by a tanh.
        bias: added to the scores; it counts queries and keys by their positions in the request.
        value_size: the values are the first so many numbers of the keys (latent attention); None where they are apart.
        heads_first: whether pages are [P, 2, G, S, H], all keys of a page and then all values, as processors without units for
            matrices read them best.
        scales: float32 [P, S, 2 G] (or [P, 2, G, S]), by which the numbers of pages of a narrow dtype are multiplied; None where
            pages hold keys and values as they are.
        local: whether the arrays are what one device has of them; see `on_each_device`.
        finite: whether all numbers in the pages are finite, those that no token wrote included. Otherwise kernels hide these.
        split: what `starts` says, as a static value; None where it depends on the data.
    """

    name = "paged_attention"

    query: jax.Array
    pages: jax.Array
    table: jax.Array
    lengths: jax.Array
    starts: jax.Array
    count: jax.Array
    scale: float = attrs.field(kw_only=True)
    window: int | None = attrs.field(default=None, kw_only=True)
    softcap: float | None = attrs.field(default=None, kw_only=True)
    bias: Bias | None = attrs.field(default=None, kw_only=True)
    value_size: int | None = attrs.field(default=None, kw_only=True)
    heads_first: bool = attrs.field(default=False, kw_only=True)
    scales: jax.Array | None = attrs.field(default=None, kw_only=True)
    finite: bool = attrs.field(default=False, kw_only=True)
    split: Split | None = attrs.field(default=None, kw_only=True)
    local: bool = attrs.field(default=False, kw_only=True)

    @property
    def groups(self) -> int:
        """G."""
        if self.heads_first:
            return self.pages.shape[2]
        return self.pages.shape[2] // (2 if self.value_size is None else 1)

    @property
    def page_size(self) -> int:
        """S."""
        return self.pages.shape[3 if self.heads_first else 1]

    def keys_and_values(self, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The pages of these numbers int32 [...] as keys [..., G, S, H] and values [..., G, S, V]."""
        pages = self._scaled_pages(numbers)
        if self.heads_first:
            return pages[..., 0, :, :, :], pages[..., 1, :, :, :]
        pages = jnp.swapaxes(pages, -3, -2)
        if self.value_size is not None:
            return pages, pages[..., : self.value_size]
        return pages[..., 0::2, :, :], pages[..., 1::2, :, :]

    def _scaled_pages(self, numbers: jax.Array) -> jax.Array:
        """The pages of these numbers, in the dtype of the queries where they have scales."""
        pages = self._take(self.pages, numbers)
        if self.scales is None:
            return pages
        scales = self._take(self.scales, numbers)[..., None]
        return (pages.astype(jnp.float32) * scales).astype(self.query.dtype)

    def _take(self, pages: jax.Array, numbers: jax.Array) -> jax.Array:
        if not (self.heads_first and self.local):
            return pages.at[numbers].get(mode="clip")
        # Rows of a matrix, whose numbers are known to be in bounds, and each read once: XLA for CPU copies those fastest.
        numbers = lax.optimization_barrier(jnp.clip(numbers, 0, pages.shape[0] - 1))
        taken = pages.reshape(pages.shape[0], -1).at[numbers].get(mode="promise_in_bounds")
        return lax.optimization_barrier(taken).reshape(*numbers.shape, *pages.shape[1:])

    def operands(self) -> Mapping[str, Any]:
        """Queries, pages and their table."""
        scales = {} if self.scales is None else {"scales": self.scales}
        return {"query": self.query, "pages": self.pages, "table": self.table, **scales}

    def options(self) -> Mapping[str, Any]:
        """Window, soft cap, bias by its structure, the size of values that are keys, order, and the static split."""
        options: dict[str, Any] = {"window": self.window, "softcap": self.softcap}
        if self.bias is not None:
            options["bias"] = self.bias.describe()
        if self.value_size is not None:
            options["value_size"] = self.value_size
        if self.heads_first:
            options["heads_first"] = True
        if self.finite:
            options["finite"] = True
        if self.split is not None:
            options["split"] = tuple(self.split)
        return options

    def flops(self) -> float:
        """Two products of each token with all slots of its row of the table: the most that its request can have."""
        tokens, heads, size = self.query.shape
        return 2.0 * tokens * heads * self.table.shape[1] * self.page_size * (size + (self.value_size or size))

    def kernel_flops(self, operands: Sequence[Shape], results: Sequence[Shape], *, opaque: bool) -> float | None:
        """By the queries [T, N, H] of a launch."""
        if not opaque:
            return None
        tokens, heads, size = operands[0]
        return 2.0 * tokens * heads * self.table.shape[1] * self.page_size * (size + (self.value_size or size))

    def bytes(self) -> float:
        """Of the pages those that the table has room for."""
        used = min(1.0, self.table.shape[0] * self.table.shape[1] / self.pages.shape[0])
        pages = math.prod(self.pages.shape) * self.pages.dtype.itemsize
        return super().bytes() - (1 - used) * pages

    def reference(self) -> jax.Array:
        """Gathers the pages of each token's request."""
        query, table, starts = self.query, self.table, self.starts
        tokens, heads, size = query.shape
        requests, groups = table.shape[0], self.groups
        ends = jnp.where(jnp.arange(requests) < self.count[0], starts[1:], tokens)
        owner = jnp.minimum(jnp.searchsorted(ends, jnp.arange(tokens), side="right"), requests - 1)
        position = self.lengths[owner] - (ends[owner] - jnp.arange(tokens))

        def one(token: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            query, row, position = token
            key, value = (
                jnp.swapaxes(x, 0, 1).reshape(groups, -1, x.shape[-1]) for x in self.keys_and_values(table[row])
            )
            grouped = (query * self.scale).reshape(groups, heads // groups, size)
            scores = jnp.einsum("gnh,gkh->gnk", grouped, key).astype(jnp.float32)
            if self.softcap is not None:
                scores = self.softcap * jnp.tanh(scores / self.softcap)
            slots = jnp.arange(key.shape[1], dtype=jnp.int32)
            if self.bias is not None:
                added = self.bias.materialize((0, 1), (0, key.shape[1]), position[None, None], slots[None])
                scores = scores + added.reshape(scores.shape)
            visible = slots <= position
            if self.window is not None:
                visible &= slots > position - self.window
            weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1).astype(value.dtype)
            value = jnp.where(visible[:, None], value, 0)  # what no token wrote may be NaN
            return jnp.einsum("gnk,gkh->gnh", weights, value).reshape(heads, -1).astype(query.dtype)

        return lax.map(one, (query, owner, position), batch_size=AT_ONCE)


def _axes(op: PagedAttentionOp) -> tuple[tuple[str | None, ...], tuple[str | None, ...]]:
    """The logical axes of queries and of pages."""
    pages = (None, None, "activation_kv", None, None) if op.heads_first else (None, None, "activation_kv", None)
    return (None, "activation_heads", None), pages


def divides_heads(op: PagedAttentionOp) -> bool:
    """Whether each device of the placement in force can attend with its own heads, and needs nothing of the others."""
    heads, pages = _axes(op)
    parts, parts_of_pages = parts_of(op.query.shape, heads)[1], parts_of(op.pages.shape, pages)[2]
    return parts == parts_of_pages and (parts == 1 or (op.bias is None and op.value_size is None))


def on_each_device(op: PagedAttentionOp, attend: Callable[[PagedAttentionOp], jax.Array]) -> jax.Array:
    """[T, N, V]; each device attends with its own heads. Where they cannot be divided so, XLA divides `attend`."""
    if not divides_heads(op):
        return attend(op)
    heads, pages = _axes(op)

    def run(query: jax.Array, pages: jax.Array, scales: Any, table: jax.Array, lengths: jax.Array) -> jax.Array:
        own = attrs.evolve(op, query=query, pages=pages, scales=scales, table=table, lengths=lengths, local=True)
        return attend(own)

    operands = (heads, pages, None if op.scales is None else pages[:-1], (None, None), (None,))
    return per_device(run, operands, heads)(op.query, op.pages, op.scales, op.table, op.lengths)
