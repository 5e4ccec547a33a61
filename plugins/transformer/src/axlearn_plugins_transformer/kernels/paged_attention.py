"""Attention of tokens of many requests over keys and values that lie in pages (Kwon et al., 2023), for serving.

Requests that are being read (prefill) and requests that are being answered (decoding) go together: each has as many queries as it
has new tokens, one after another along one axis, and no row is padded.

T tokens, N query heads, G key-value heads (N is a multiple of G), H head size, P pages of S slots, R requests of at most M pages.
"""

import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.contracts.kernels import OpRequest
from axlearn_core.kernels import selection

AT_ONCE = 64
"""Tokens whose keys the reference gathers at one time."""


def paged_attention(
    query: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    starts: jax.Array,
    count: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    kernel: str | None = None,
) -> jax.Array:
    """softmax(mask(cap(scale * query @ key))) @ value under a causal mask, the softmax in float32. It has no derivative.

    Args:
        query: [T, N, H], the new tokens of request 0, then those of request 1, and so on; what is behind the last is not used.
        pages: [P, S, 2 G, H], of head g the keys at 2 g and the values at 2 g + 1. Those of the new tokens are in them.
        table: int32 [R, M], the pages of each request in the order of its tokens. Unused entries hold anything.
        lengths: int32 [R], the tokens of each request, new ones included.
        starts: int32 [R + 1], where along T the new tokens of each request begin; the last entry is where they all end.
        count: int32 [1], how many requests there are; what is behind them in the other arrays is not used.
        scale: multiplies the queries.
        window: the last keys that a query sees; None where there is no limit.
        softcap: caps the scores to (-softcap, softcap) by a tanh.
        kernel: the name of an implementation; None leaves the choice to the selection in force.

    Returns:
        [T, N, H] in the dtype of the queries; of tokens that no request has, anything.

    Raises:
        RequestError: the implementation does not exist or cannot do it.
    """
    options = {"window": window, "softcap": softcap}
    run = selection.chosen("paged_attention", {"query": query, "pages": pages, "table": table}, options, kernel)
    return run(query, pages, table, lengths, starts, count, scale=scale, window=window, softcap=softcap)


class _XLA:
    """Gathers the pages of each token's request."""

    def supports(self, request: OpRequest) -> str | None:
        """Everything."""
        return None

    def __call__(
        self,
        query: jax.Array,
        pages: jax.Array,
        table: jax.Array,
        lengths: jax.Array,
        starts: jax.Array,
        count: jax.Array,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> jax.Array:
        """See `paged_attention`."""
        tokens, heads, size = query.shape
        requests, groups = table.shape[0], pages.shape[2] // 2
        ends = jnp.where(jnp.arange(requests) < count[0], starts[1:], tokens)
        owner = jnp.minimum(jnp.searchsorted(ends, jnp.arange(tokens), side="right"), requests - 1)
        position = lengths[owner] - (ends[owner] - jnp.arange(tokens))

        def one(token: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            query, row, position = token
            mine = pages.at[table[row]].get(mode="clip").reshape(-1, groups, 2, size)
            key, value = mine[:, :, 0], mine[:, :, 1]
            grouped = (query * scale).reshape(groups, heads // groups, size)
            scores = jnp.einsum("gnh,kgh->gnk", grouped, key).astype(jnp.float32)
            if softcap is not None:
                scores = softcap * jnp.tanh(scores / softcap)
            slots = jnp.arange(key.shape[0])
            seen = slots <= position
            if window is not None:
                seen &= slots > position - window
            weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1).astype(value.dtype)
            value = jnp.where(seen[:, None, None], value, 0)  # what no token wrote may be no number
            return jnp.einsum("gnk,kgh->gnh", weights, value).reshape(heads, size).astype(query.dtype)

        return lax.map(one, (query, owner, position), batch_size=AT_ONCE)


XLA = _XLA()
