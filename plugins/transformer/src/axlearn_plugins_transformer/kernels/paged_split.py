"""The op `paged_attention` where it is known, when the program is compiled, how many new tokens each request has.

Legend: R requests of at most M pages of S slots, C tokens of a request, N query heads, G key-value heads, H head size, V size
of a value, K = M S.
"""

import jax
import jax.numpy as jnp

from axlearn_core.contracts.kernels import KernelContext
from axlearn_plugins_transformer.kernels.paged_attention import PagedAttention


class _XLASplit:
    """Gathers the pages of each request once, for all of its new tokens."""

    def supports(self, op: PagedAttention, context: KernelContext) -> str | None:
        """A static split."""
        return None if op.split is not None else "how many tokens each request has is not known when it is compiled"

    def __call__(self, op: PagedAttention) -> jax.Array:
        """[T, N, V]."""
        assert op.split is not None
        singles, chunk = op.split
        parts = []
        if singles:
            parts.append(_attend(op, slice(0, singles), op.query[:singles, None]))
        if op.table.shape[0] > singles:
            rest = op.query[singles:].reshape(-1, chunk, *op.query.shape[1:])
            parts.append(_attend(op, slice(singles, None), rest))
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _attend(op: PagedAttention, requests: slice, query: jax.Array) -> jax.Array:
    """[R, C, N, H] -> [R C, N, V]."""
    rows, count, heads, size = query.shape
    table, lengths, groups = op.table[requests], op.lengths[requests], op.groups
    pages = op.pages.at[table].get(mode="clip")
    key, value = op.keys_and_values(pages.reshape(rows, -1, *pages.shape[3:]))
    slots = jnp.arange(key.shape[1], dtype=jnp.int32)[None]
    positions = lengths[:, None] - count + jnp.arange(count, dtype=jnp.int32)[None]
    grouped = (query * op.scale).reshape(rows, count, groups, heads // groups, size)
    scores = jnp.einsum("rcgnh,rkgh->rgnck", grouped, key).astype(jnp.float32)
    if op.softcap is not None:
        scores = op.softcap * jnp.tanh(scores / op.softcap)
    if op.bias is not None:
        added = op.bias.materialize((0, count), (0, key.shape[1]), positions, slots)
        scores = scores + added.reshape(rows, groups, heads // groups, count, -1)
    seen = slots[:, None] <= positions[..., None]
    if op.window is not None:
        seen &= slots[:, None] > positions[..., None] - op.window
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30), axis=-1).astype(value.dtype)
    used = slots < lengths[:, None]
    value = jnp.where(used[..., None, None], value, 0)  # what no token wrote may be no number
    result = jnp.einsum("rgnck,rkgh->rcgnh", weights, value)
    return result.reshape(rows * count, heads, -1).astype(query.dtype)


XLA_SPLIT = _XLASplit()
