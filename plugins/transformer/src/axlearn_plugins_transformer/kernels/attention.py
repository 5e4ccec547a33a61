"""Scaled dot-product attention.

B batch, Q queries, K keys, N query heads, G key-value heads (N is a multiple of G), H head size, V size of the values.
"""

import jax
import jax.numpy as jnp

from axlearn_core.contracts.kernels import OpRequest
from axlearn_core.kernels import selection
from axlearn_plugins_transformer.kernels.bias import Bias
from axlearn_plugins_transformer.kernels.masks import Mask, Range

BLOCK = 128
MAX_BLOCKS = 64


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    bias: Bias | None = None,
    query_slots: jax.Array | None = None,
    key_slots: jax.Array | None = None,
    kernel: str | None = None,
) -> jax.Array:
    """softmax(mask(cap(scale * query @ key) + bias)) @ value, the softmax in float32.

    Args:
        query: [B, Q, N, H].
        key: [B, K, G, H].
        value: [B, K, G, V]; in most models V is H.
        mask: which keys each query sees.
        scale: multiplies the queries.
        softcap: caps the scores to (-softcap, softcap) by a tanh.
        bias: what is added to them. A kernel gets it only where there is one; the option `bias` describes it.
        query_slots: int32 [B or 1, Q], the slots that the mask counts by; None means the index.
        key_slots: int32 [B or 1, K].
        kernel: the name of an implementation; None leaves the choice to the selection in force.

    Returns:
        [B, Q, N, V] in the dtype of the value.

    Raises:
        RequestError: the implementation does not exist or cannot do it.
    """
    q_len, k_len = query.shape[1], key.shape[1]
    aligned = query_slots is None and key_slots is None and q_len == k_len
    blocks = range(0, k_len, BLOCK) if aligned else ()
    options = {
        "mask": mask.describe(),
        "softcap": softcap,
        "bias": None if bias is None else bias.describe(),
        "aligned": aligned,
        "skips": any(mask.block((i, i + BLOCK), (j, j + BLOCK)) is False for i in blocks for j in blocks),
    }
    run = selection.chosen("attention", {"query": query, "key": key, "value": value}, options, kernel)
    slots = {"query_slots": query_slots, "key_slots": key_slots}
    biased = {} if bias is None else {"bias": bias}  # kernels that know of no biases are not called with one
    return run(query, key, value, mask=mask, scale=scale, softcap=softcap, **slots, **biased)


def _by_head(query: jax.Array, key: jax.Array, value: jax.Array, scale: float) -> tuple[jax.Array, ...]:
    """Queries, scaled, as [B, N, Q, H]; keys and values repeated to the query heads, [B, N, K, H]."""
    repeats = query.shape[2] // key.shape[2]
    if repeats > 1:
        key, value = jnp.repeat(key, repeats, axis=2), jnp.repeat(value, repeats, axis=2)
    return jnp.swapaxes(query * scale, 1, 2), jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array | None,
    softcap: float | None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """[..., Q, H], [..., K, H], [..., K, V], a mask [B or 1, 1..., Q, K], a bias [B or 1, ..., Q, K] -> [..., Q, V]."""
    scores = jnp.einsum("...td,...sd->...ts", q, k).astype(jnp.float32)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = jnp.where(visible, scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("...ts,...sd->...td", weights, v)


class _XLA:
    """The plain formulation."""

    def supports(self, request: OpRequest) -> str | None:
        """Everything."""
        return None

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        mask: Mask,
        scale: float,
        softcap: float | None,
        query_slots: jax.Array | None,
        key_slots: jax.Array | None,
        bias: Bias | None = None,
    ) -> jax.Array:
        """See `attention`."""
        queries, keys = (0, query.shape[1]), (0, key.shape[1])
        visible = mask.materialize(queries, keys, query_slots, key_slots)
        added = None if bias is None else bias.materialize(queries, keys, query_slots, key_slots)
        if query_slots is None or query.shape[1] > 1 or query.shape[2] == key.shape[2]:
            q, k, v = _by_head(query, key, value, scale)
            return jnp.swapaxes(_attend(q, k, v, visible[:, None], softcap, added), 1, 2)
        # Decoding: the group of query heads takes the place of the queries, so that no key is repeated.
        batch, _, heads, size = query.shape
        groups = (key.shape[2], heads // key.shape[2])
        q = (query * scale).reshape(batch, *groups, size)
        if added is not None:
            added = added.reshape(added.shape[0], *groups, key.shape[1])
        out = _attend(q, jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2), visible[:, None], softcap, added)
        return out.reshape(batch, 1, heads, value.shape[3])


class _XLABlocked:
    """A block of queries at a time, over the keys from the first visible block to the last."""

    def supports(self, request: OpRequest) -> str | None:
        """Self-attention whose mask hides whole blocks."""
        length = request.shapes["query"][1]
        if not request.options["aligned"]:
            return "queries and keys are not the same positions"
        if length % BLOCK:
            return f"the sequence length {length} is no multiple of {BLOCK}"
        if length // BLOCK > MAX_BLOCKS:
            return f"the sequence length {length} makes more than {MAX_BLOCKS} blocks, each with code of its own"
        return None if request.options["skips"] else f"the mask ({request.options['mask']}) hides no whole block"

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        mask: Mask,
        scale: float,
        softcap: float | None,
        query_slots: jax.Array | None,
        key_slots: jax.Array | None,
        bias: Bias | None = None,
    ) -> jax.Array:
        """See `attention`."""
        q, k, v = _by_head(query, key, value, scale)
        parts = []
        for start in range(0, query.shape[1], BLOCK):
            rows = (start, start + BLOCK)
            low, high = _visible_keys(mask, rows, key.shape[1])
            visible = None if mask.block(rows, (low, high)) else mask.materialize(rows, (low, high))[:, None]
            added = None if bias is None else bias.materialize(rows, (low, high))
            parts.append(_attend(q[:, :, slice(*rows)], k[:, :, low:high], v[:, :, low:high], visible, softcap, added))
        return jnp.swapaxes(jnp.concatenate(parts, axis=2), 1, 2)


def _visible_keys(mask: Mask, rows: Range, length: int) -> Range:
    """From the first key block that a query of `rows` may see to the last."""
    starts = [j for j in range(0, length, BLOCK) if mask.block(rows, (j, j + BLOCK)) is not False]
    return (starts[0], starts[-1] + BLOCK) if starts else (0, BLOCK)


XLA = _XLA()
XLA_BLOCKED = _XLABlocked()
