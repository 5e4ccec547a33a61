"""The `paged_attention` op: attention over keys and values in pages, for serving.

See Kwon et al., 2023. One call serves requests in prefill and in decoding. Each request has one query per new token;
the queries of all requests are concatenated along one axis without padding.

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
from axlearn_plugins_transformer.kernels import masks
from axlearn_plugins_transformer.kernels.bias import Bias
from axlearn_plugins_transformer.kernels.mask_arrays import visible_slots
from axlearn_plugins_transformer.kernels.masks import Mask
from axlearn_plugins_transformer.kernels.per_device import count_shards, per_device
from axlearn_plugins_transformer.kernels.sinks import check_sinks

LOW = -1e30
"""Score of hidden keys."""
TOKEN_BATCH = 64
"""Tokens whose keys the reference gathers at a time."""


class Split(NamedTuple):
    """The static number of new tokens per request.

    Attributes:
        singles: Number of leading requests, which have one token each.
        chunk: Number of new tokens in each of the other requests.
    """

    singles: int
    chunk: int


@attrs.frozen(eq=False)
class PagedAttentionOp(Op[Any]):
    """softmax(mask(cap(scale * query @ key) + bias)) @ value.

    The softmax is in float32. The op is not differentiable. The result is [T, N, H] in the dtype of the queries, or
    [T, N, value_size] with `value_size`. With `log_sum_exp`, it is a pair of this and float32 [T, N]. Rows of tokens that do not
    belong to a request are unspecified.

    Attributes:
        query: New tokens of request 0, then of request 1, and so on, [T, N, H]. Tokens after the last request are unused.
        pages: Keys and values including those of the new tokens, [P, S, 2 G, H]. Head g has its keys at 2 g and its values
            at 2 g + 1. With `value_size`, only keys, [P, S, G, H]; see there for `heads_first`.
        table: Pages of each request in token order, int32 [R, M]. Unused entries are arbitrary.
        lengths: Tokens of each request including new ones, int32 [R].
        starts: Index of each request's first new token, int32 [R + 1]. The last entry is the end of the last request.
        count: Number of requests, int32 [1]. Later entries of the other arrays are unused.
        scale: Factor applied to the queries.
        mask: Mask over the slots of each request, as for T rows of one query each: the first dimension of its arrays is T, or 1 if
            all tokens share them. Keys that are not written yet are hidden as well. Kernels see other masks than causal ones, with
            or without windows, only if their declaration includes `mask` in `extras`.
        softcap: Bound on the scores, applied with a tanh: (-softcap, softcap). None does not cap them.
        bias: Bias added to the scores, indexed by position in the request, or None.
        value_size: Use the first `value_size` elements of the keys as values (latent attention). None stores values
            separately. With `heads_first`, values are always separate, and `value_size` is their size if it is not H; the rest of
            their slots is padding.
        heads_first: Whether pages are [P, 2, G, S, H], with all keys of a page before all values. This is the fastest
            layout for processors without matrix units.
        scales: Factors applied to the elements of narrow pages, float32 [P, S, 2 G] or [P, 2, G, S]. None for unscaled pages.
        finite: Whether all elements of the pages are finite, including unwritten slots. If not, kernels mask those slots.
        split: The information in `starts` as a static value, or None if it depends on the data.
        local: Whether the arrays are the shards of one device; see `on_each_device`.
        sinks: Logit of each query head for attending to nothing, [N], or None; see `AttentionOp`.
        log_sum_exp: Whether to also return the logarithm of the softmax's denominator.
    """

    name = "paged_attention"

    query: jax.Array
    pages: jax.Array
    table: jax.Array
    lengths: jax.Array
    starts: jax.Array
    count: jax.Array
    scale: float = attrs.field(kw_only=True)
    mask: Mask = attrs.field(factory=masks.Causal, kw_only=True)
    softcap: float | None = attrs.field(default=None, kw_only=True)
    bias: Bias | None = attrs.field(default=None, kw_only=True)
    value_size: int | None = attrs.field(default=None, kw_only=True)
    heads_first: bool = attrs.field(default=False, kw_only=True)
    scales: jax.Array | None = attrs.field(default=None, kw_only=True)
    finite: bool = attrs.field(default=False, kw_only=True)
    split: Split | None = attrs.field(default=None, kw_only=True)
    local: bool = attrs.field(default=False, kw_only=True)
    sinks: jax.Array | None = attrs.field(default=None, kw_only=True)
    log_sum_exp: bool = attrs.field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_sinks(self)

    @property
    def window(self) -> int | None:
        """The number of most recent keys that a query attends to, or None if the mask has no window."""
        return masks.window_size(self.mask)

    @property
    def groups(self) -> int:
        """The number of key-value heads, G."""
        if self.heads_first:
            return self.pages.shape[2]
        return self.pages.shape[2] // (2 if self.value_size is None else 1)

    @property
    def page_size(self) -> int:
        """The number of slots per page, S."""
        return self.pages.shape[3 if self.heads_first else 1]

    def keys_and_values(self, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the keys and values of pages.

        The indices are int32 [...], the keys [..., G, S, H], the values [..., G, S, V].
        """
        pages = self._scaled_pages(numbers)
        if self.heads_first:
            return pages[..., 0, :, :, :], pages[..., 1, :, :, : self.value_size]
        pages = jnp.swapaxes(pages, -3, -2)
        if self.value_size is not None:
            return pages, pages[..., : self.value_size]
        return pages[..., 0::2, :, :], pages[..., 1::2, :, :]

    def _scaled_pages(self, numbers: jax.Array) -> jax.Array:
        """Return the pages with these indices.

        Pages with scales are converted to the dtype of the queries.
        """
        pages = self._take(self.pages, numbers)
        if self.scales is None:
            return pages
        scales = self._take(self.scales, numbers)[..., None]
        return (pages.astype(jnp.float32) * scales).astype(self.query.dtype)

    def _take(self, pages: jax.Array, numbers: jax.Array) -> jax.Array:
        if not (self.heads_first and self.local):
            return pages.at[numbers].get(mode="clip")
        # XLA on CPUs copies matrix rows fastest if their indices are in bounds and each row is read once.
        numbers = lax.optimization_barrier(jnp.clip(numbers, 0, pages.shape[0] - 1))
        rows = pages.reshape(pages.shape[0], -1).at[numbers].get(mode="promise_in_bounds")
        return lax.optimization_barrier(rows).reshape(*numbers.shape, *pages.shape[1:])

    def operands(self) -> Mapping[str, Any]:
        """Return the queries, the pages and the table."""
        optional = {"scales": self.scales, "sinks": self.sinks}
        present = {name: x for name, x in optional.items() if x is not None}
        return {"query": self.query, "pages": self.pages, "table": self.table, **present}

    def extras(self) -> tuple[str, ...]:
        """Return `sinks` and `log_sum_exp` if the call uses them, and `mask` if it is not only causal with or without windows."""
        uses = {
            "sinks": self.sinks is not None,
            "log_sum_exp": self.log_sum_exp,
            "mask": not masks.is_causal_window(self.mask),
        }
        return tuple(name for name, used in uses.items() if used)

    def options(self) -> Mapping[str, Any]:
        """Return the options that are set, with the bias described by its structure."""
        options: dict[str, Any] = {"window": self.window, "softcap": self.softcap}
        if not masks.is_causal_window(self.mask):
            options["mask"] = self.mask.describe()
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
        if self.log_sum_exp:
            options["log_sum_exp"] = True
        return options

    def flops(self) -> float:
        """Count two matmuls of each token with all slots of its table row.

        This is an upper bound, because its request may use fewer slots.
        """
        tokens, heads, size = self.query.shape
        return 2.0 * tokens * heads * self.table.shape[1] * self.page_size * (size + (self.value_size or size))

    def request_flops(self, new: int, cached: int) -> float:
        """Return the FLOPs for one request with `new` tokens after `cached` ones, without those of hidden keys."""
        last = cached + new
        keys = last * (last + 1) / 2 - cached * (cached + 1) / 2
        if (most := self.mask.most_keys()) is not None:  # without the keys that the mask hides from later tokens
            old, first = max(0, last - most), max(0, cached - most)
            keys -= old * (old + 1) / 2 - first * (first + 1) / 2
        _, heads, size = self.query.shape
        return 2.0 * heads * keys * (size + (self.value_size or size))

    def visible(self) -> float:
        """Return the share of the slots of a table row that the mask leaves visible."""
        return masks.visible_keys(self.mask, self.table.shape[1] * self.page_size)

    def kernel_flops(self, operands: Sequence[Shape], results: Sequence[Shape], *, opaque: bool) -> float | None:
        """Count the FLOPs of a launch from its queries [T, N, H]."""
        if not opaque:
            return None
        tokens, heads, size = operands[0]
        return 2.0 * tokens * heads * self.table.shape[1] * self.page_size * (size + (self.value_size or size))

    def bytes(self) -> float:
        """Count only as many pages as the table has entries."""
        used = min(1.0, self.table.shape[0] * self.table.shape[1] / self.pages.shape[0])
        pages = math.prod(self.pages.shape) * self.pages.dtype.itemsize
        return super().bytes() - (1 - used) * pages

    def reference(self) -> Any:
        """Gather the pages of each token's request."""
        query, table, starts = self.query, self.table, self.starts
        tokens, heads, size = query.shape
        requests, groups = table.shape[0], self.groups
        ends = jnp.where(jnp.arange(requests) < self.count[0], starts[1:], tokens)
        owner = jnp.minimum(jnp.searchsorted(ends, jnp.arange(tokens), side="right"), requests - 1)
        position = self.lengths[owner] - (ends[owner] - jnp.arange(tokens))

        mask = jax.tree.map(lambda x: jnp.broadcast_to(x, (tokens, *x.shape[1:])), self.mask)

        def attend_token(token: tuple[Any, ...]) -> Any:
            query, row, position, mask = token
            length = self.lengths[row] if self.mask.lookahead() else None
            key, value = (
                jnp.swapaxes(x, 0, 1).reshape(groups, -1, x.shape[-1]) for x in self.keys_and_values(table[row])
            )
            grouped = (query * self.scale).reshape(groups, heads // groups, size)
            scores = jnp.einsum("gnh,gkh->gnk", grouped, key).astype(jnp.float32)
            if self.softcap is not None:
                scores = self.softcap * jnp.tanh(scores / self.softcap)
            slots = jnp.arange(key.shape[1], dtype=jnp.int32)
            if self.bias is not None:
                bias = self.bias.materialize((0, 1), (0, key.shape[1]), position[None, None], slots[None])
                scores = scores + bias.reshape(scores.shape)
            mask = jax.tree.map(lambda x: x[None], mask)
            visible = visible_slots(mask, position[None], slots, length)[0]
            scores = self._with_sinks(jnp.where(visible, scores, -1e30))
            weights = jax.nn.softmax(scores, axis=-1)[..., : key.shape[1]].astype(value.dtype)
            value = jnp.where(visible[:, None], value, 0)  # unwritten slots may contain NaN
            result = jnp.einsum("gnk,gkh->gnh", weights, value).reshape(heads, -1).astype(query.dtype)
            return (result, jax.nn.logsumexp(scores, axis=-1).reshape(heads)) if self.log_sum_exp else result

        return lax.map(attend_token, (query, owner, position, mask), batch_size=TOKEN_BATCH)

    def _with_sinks(self, scores: jax.Array) -> jax.Array:
        """Return the scores [G, n, K] and those of the sinks, if there are any, [G, n, K + 1]."""
        if self.sinks is None:
            return scores
        sinks = self.sinks.astype(jnp.float32).reshape(*scores.shape[:-1], 1)
        return jnp.concatenate([scores, sinks], axis=-1)


def initial_softmax(shape: Sequence[int], sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return the maximum and the denominator of an online softmax before the first key, float32.

    A sink acts as a first key without a value.

    Args:
        shape: Shape of the denominators.
        sinks: Logits that broadcast to the shape, or None.
    """
    if sinks is None:
        return jnp.full(shape, LOW, jnp.float32), jnp.zeros(shape, jnp.float32)
    return jnp.broadcast_to(sinks.astype(jnp.float32), shape), jnp.ones(shape, jnp.float32)


def _axes(op: PagedAttentionOp) -> tuple[tuple[str | None, ...], tuple[str | None, ...]]:
    """Return the logical axes of queries and of pages."""
    pages = (None, None, "activation_kv", None, None) if op.heads_first else (None, None, "activation_kv", None)
    return (None, "activation_heads", None), pages


def divides_heads(op: PagedAttentionOp) -> bool:
    """Return whether each device can attend with its own heads.

    This is the case if attention needs no communication under the current placement.
    """
    heads, pages = _axes(op)
    parts, page_parts = count_shards(op.query.shape, heads)[1], count_shards(op.pages.shape, pages)[2]
    return parts == page_parts and (parts == 1 or (op.bias is None and op.value_size is None))


def on_each_device(op: PagedAttentionOp, attend: Callable[[PagedAttentionOp], jax.Array]) -> jax.Array:
    """Attend with each device's own heads and return [T, N, V].

    If the heads cannot be divided, XLA partitions `attend`.
    """
    if not divides_heads(op):
        return attend(op)
    heads, pages = _axes(op)

    def run(
        query: jax.Array, pages: jax.Array, scales: Any, table: jax.Array, lengths: jax.Array, sinks: Any, *mask: Any
    ) -> jax.Array:
        arrays = {"query": query, "pages": pages, "scales": scales, "table": table, "lengths": lengths, "sinks": sinks}
        return attend(attrs.evolve(op, **arrays, mask=structure.unflatten(mask), local=True))

    scales, sinks = None if op.scales is None else pages[:-1], None if op.sinks is None else heads[1:2]
    mask, structure = jax.tree.flatten(op.mask)
    operands = (heads, pages, scales, (None, None), (None,), sinks, *((None,) * x.ndim for x in mask))
    return per_device(run, operands, heads)(op.query, op.pages, op.scales, op.table, op.lengths, op.sinks, *mask)
