"""The `linear_attention` op: attention with a state of fixed size.

Each head keeps a matrix S, [K, V], that decays and to which each token adds an outer product:

    S <- diag(exp(decay)) S                                  decay per head, or per element of the key
    S <- S + key (x) strength (value - S^T key)              with `strength`: the delta rule
    S <- S + key (x) value                                   without
    result = S^T query * scale

This covers gated linear attention and Mamba-2 (Dao & Gu, 2024, arXiv 2405.21060), gated DeltaNet (Yang et al., 2024, arXiv
2412.06464), and Kimi delta attention (Kimi Team, 2025, arXiv 2510.26692), whose decay is per element.

Legend: B sequences, T tokens, G heads of queries and keys, H heads of values (a multiple of G), K key size, V value size,
C tokens of a chunk, M chunks.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.kernels.op import Op
from axlearn_plugins_transformer.recurrence import Reload

CHUNK = 32
"""Tokens that `xla-chunked` computes together, unless the call has chunks of its own. On CPUs, 64 takes 1.6 times as long."""
BLOCK = 16
"""Tokens whose decays per element are multiplied pair by pair, which avoids overflow."""


class LinearAttentionResult(NamedTuple):
    """The result of the op.

    Attributes:
        values: [B, T, H, V], in the dtype of the op's values.
        states: States after the last token, float32 [B, H, K, V]; with `reload`, after each chunk, [B, M, H, K, V].
    """

    values: jax.Array
    states: jax.Array


@attrs.frozen(eq=False)
class LinearAttentionOp(Op[LinearAttentionResult]):
    """Linear attention with decay and, optionally, the delta rule. See the module's documentation.

    Attributes:
        query: [B, T, G, K].
        key: [B, T, G, K]. With `strength`, it should have at most length 1.
        value: [B, T, H, V].
        decay: Logarithm of the decay, at most 0: float32 [B, T, H], or [B, T, H, K] per element.
        strength: Share of the old value that a token replaces, float32 [B, T, H]; None adds values without the delta rule.
        documents: int32 [B, T], not decreasing. The state is reset if the number changes. None if each sequence is one document.
        state: State before the first token, float32 [B, H, K, V]; None is zero.
        reload: States with which chunks of T / M tokens begin; see `Reload`.
        scale: Factor applied to the results.
    """

    name = "linear_attention"

    query: jax.Array
    key: jax.Array
    value: jax.Array
    decay: jax.Array
    strength: jax.Array | None = attrs.field(default=None, kw_only=True)
    documents: jax.Array | None = attrs.field(default=None, kw_only=True)
    state: jax.Array | None = attrs.field(default=None, kw_only=True)
    reload: Reload | None = attrs.field(default=None, kw_only=True)
    scale: float = attrs.field(kw_only=True)

    def operands(self) -> Mapping[str, Any]:
        """Return the queries, keys, values and decays."""
        return {"query": self.query, "key": self.key, "value": self.value, "decay": self.decay}

    def options(self) -> Mapping[str, Any]:
        """Return the form of the recurrence, and how states are passed in and out."""
        return {
            "delta": self.strength is not None,
            "documents": self.documents is not None,
            "state": self.state is not None,
            "chunk": None if self.reload is None else self.reload.chunk,
        }

    def extras(self) -> tuple[str, ...]:
        """Return the optional operands that this call uses."""
        optional = {"documents": self.documents, "state": self.state, "reload": self.reload}
        return tuple(name for name, value in optional.items() if value is not None)

    def flops(self) -> float:
        """Return the FLOPs of the recurrence, token by token: its products of a state with a key or a query."""
        rows, tokens, heads, values = self.value.shape
        products = 1 if self.strength is None else 2
        return 2.0 * products * rows * tokens * heads * values * self.key.shape[-1]

    def request_flops(self, new: int, cached: int) -> float:
        """Return the FLOPs for one request with `new` tokens. They do not depend on the number of earlier tokens."""
        rows, tokens = self.value.shape[:2]
        return self.flops() / (rows * tokens) * new

    def per_head(self) -> tuple[jax.Array, jax.Array]:
        """Return the queries and keys for each head of the values, float32 [B, T, H, K]."""
        repeats = self.value.shape[2] // self.query.shape[2]
        query, key = (jnp.repeat(x.astype(jnp.float32), repeats, axis=2) for x in (self.query, self.key))
        return query, key

    def initial(self) -> jax.Array:
        """Return the state before the first token, float32 [B, H, K, V]."""
        shape = (self.value.shape[0], self.value.shape[2], self.key.shape[-1], self.value.shape[-1])
        return jnp.zeros(shape, jnp.float32) if self.state is None else self.state.astype(jnp.float32)

    def sample(self, rng: np.random.Generator) -> "LinearAttentionOp":
        """Return random operands: keys of length 1, decays below 0, strengths between 0 and 1."""
        drawn = super().sample(rng)
        key = drawn.key / jnp.maximum(jnp.linalg.norm(drawn.key, axis=-1, keepdims=True), 1e-6).astype(drawn.key.dtype)
        strength = None if drawn.strength is None else jax.nn.sigmoid(drawn.strength)
        return attrs.evolve(drawn, key=key, decay=-jnp.abs(drawn.decay), strength=strength)

    def reference(self) -> LinearAttentionResult:
        """Compute the recurrence, token by token."""
        query, key = self.per_head()
        value, decay = self.value.astype(jnp.float32), jnp.exp(self.decay.astype(jnp.float32))
        decay = decay if decay.ndim == 4 else decay[..., None]
        tokens = value.shape[1]
        starts = _starts(self.documents, (value.shape[0], tokens))
        if self.reload is None:
            reloads: Any = None
        else:
            chunk = self.reload.chunk
            first = jnp.arange(tokens) % chunk == 0
            restarts = jnp.repeat(self.reload.restarts, chunk, axis=1) & first[None]
            reloads = jnp.moveaxis(restarts, 1, 0), jnp.arange(tokens) // chunk

        def step(state: jax.Array, token: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
            q, k, v, g, b, start, reload = token
            state = jnp.where(start[:, None, None, None], 0.0, state)
            if reload is not None and self.reload is not None:
                restart, index = reload
                state = jnp.where(restart[:, None, None, None], self.reload.states[:, index].astype(jnp.float32), state)
            state = state * g[..., None]
            added = v if b is None else b[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", state, k))
            state = state + k[..., None] * added[:, :, None]
            return state, (jnp.einsum("bhkv,bhk->bhv", state, q), None if reload is None else state)

        by_token = [jnp.moveaxis(x, 1, 0) for x in (query, key, value, decay)]
        strength = None if self.strength is None else jnp.moveaxis(self.strength.astype(jnp.float32), 1, 0)
        state, (result, states) = lax.scan(
            step, self.initial(), (*by_token, strength, jnp.moveaxis(starts, 1, 0), reloads)
        )
        if states is not None and self.reload is not None:
            state = jnp.moveaxis(states[self.reload.chunk - 1 :: self.reload.chunk], 0, 1)
        return LinearAttentionResult((jnp.moveaxis(result, 0, 1) * self.scale).astype(self.value.dtype), state)


def _starts(documents: jax.Array | None, shape: tuple[int, int]) -> jax.Array:
    """Return whether each token but the first of a sequence begins a document, bool [B, T]."""
    if documents is None:
        return jnp.zeros(shape, bool)
    return jnp.concatenate([jnp.zeros_like(documents[:, :1], bool), jnp.diff(documents, axis=1) != 0], axis=1)


def _split_reload(reload: Reload | None, size: int, count: int) -> tuple[tuple[jax.Array, jax.Array] | None, int]:
    """Split the states with which chunks of a serving step begin into `count` parts of `size` tokens.

    Returns:
        Whether each part restarts, bool [M, B], and its state, [M, B, H, K, V]; and the number of parts per chunk. Only the first
        part of a chunk may restart, and the last one has the chunk's state.
    """
    if reload is None:
        return None, 1
    parts = reload.chunk // size
    restarts = jnp.repeat(reload.restarts, parts, axis=1) & (jnp.arange(count) % parts == 0)[None]
    states = jnp.repeat(reload.states, parts, axis=1)
    return (jnp.moveaxis(restarts, 1, 0), jnp.moveaxis(states, 1, 0)), parts


def _run_chunk(state: jax.Array, chunk: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
    """Compute the results of one chunk, and the state after it. The state is a result too if chunks may restart."""
    query, scores, targets, entering, outward, retention, reload = chunk
    if reload is not None:
        restart, states = reload
        state = jnp.where(restart[:, None, None, None], states.astype(jnp.float32), state)
    added = targets if entering is None else targets - entering @ state
    result = query @ state + scores @ added
    state = retention * state + jnp.swapaxes(outward, -1, -2) @ added
    return state, (result, None if reload is None else state)


class Chunked:
    """The kernel `xla-chunked`: matrix products within chunks, and a loop over chunks for the states.

    The delta rule within a chunk is a triangular system (Yang et al., 2024, arXiv 2406.06484, sections 3.2 and 3.3).
    """

    def supports(self, op: LinearAttentionOp, context: KernelContext) -> str | None:
        """Return None if the sequences have several tokens."""
        return "single tokens have no chunks" if op.value.shape[1] == 1 else None

    def __call__(self, op: LinearAttentionOp) -> LinearAttentionResult:
        """Compute the op."""
        tokens = op.value.shape[1]
        size = min(CHUNK, -(-tokens // BLOCK) * BLOCK)
        if op.reload is not None:
            size = op.reload.chunk if op.reload.chunk % CHUNK else CHUNK
        count = -(-tokens // size)

        def split(x: jax.Array) -> jax.Array:
            """Split [B, T, H, ...] into chunks [M, B, H, C, ...]. Zeros as padding do not change the state."""
            x = jnp.pad(x, [(0, 0), (0, count * size - tokens), *[(0, 0)] * (x.ndim - 2)])
            x = x.reshape(x.shape[0], count, size, *x.shape[2:])
            return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 3, 2)

        query, key = op.per_head()
        vector = op.decay.ndim == 4
        query, key, value, decay = (split(x.astype(jnp.float32)) for x in (query, key, op.value, op.decay))
        strength = None if op.strength is None else split(op.strength.astype(jnp.float32))
        decay = decay if vector else decay[..., None]  # [M, B, H, C, K or 1]
        total = jnp.cumsum(decay, axis=3)
        later = lax.cumsum(jnp.pad(decay[..., 1:, :], [(0, 0)] * 3 + [(0, 1), (0, 0)]), axis=3, reverse=True)
        documents = None
        if op.documents is not None:
            padded = jnp.pad(op.documents, [(0, 0), (0, count * size - tokens)], mode="edge")
            documents = jnp.moveaxis(padded.reshape(-1, count, size), 1, 0)
        same, enters, leaves = _document_masks(documents, count, size)
        scores = _decayed_products(query, key, decay, total, same)
        into = jnp.exp(total) * enters  # decay of the state that enters the chunk, until each token
        if strength is None:
            targets, entering = value, None
        else:
            lower = jnp.tril(_decayed_products(key, key, decay, total, same) * strength[..., None], -1)
            right = jnp.concatenate([value, key * into], axis=-1) * strength[..., None]
            # The values that the tokens of a chunk add, given those of the tokens before them.
            solution = _invert(lower) @ right
            targets, entering = solution[..., : value.shape[-1]], solution[..., value.shape[-1] :]
        outward = key * jnp.exp(later) * leaves
        retention = jnp.swapaxes(jnp.exp(total[..., -1:, :]) * enters[..., -1:, :], -1, -2)  # [M, B, H, K or 1, 1]
        reload, parts = _split_reload(op.reload, size, count)
        state, (result, states) = lax.scan(
            _run_chunk, op.initial(), (query * into, jnp.tril(scores), targets, entering, outward, retention, reload)
        )
        result = jnp.moveaxis(jnp.moveaxis(result, 2, 3), 0, 1)  # [B, M, C, H, V]
        result = result.reshape(result.shape[0], -1, *result.shape[3:])[:, :tokens]
        if states is not None:
            state = jnp.moveaxis(states[parts - 1 :: parts], 0, 1)
        return LinearAttentionResult((result * op.scale).astype(op.value.dtype), state)


def _invert(lower: jax.Array) -> jax.Array:
    """Return the inverse of I + lower, [..., C, C], for a strictly lower triangular matrix.

    The inverses of diagonal blocks are merged, two at a time. Batched products are much faster than XLA's triangular solve.
    """
    size = lower.shape[-1]
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    row, column = np.arange(size)[:, None], np.arange(size)[None]
    width = 1
    while width < size:
        pair = (row // (2 * width) == column // (2 * width)) & (row // width > column // width)
        mask = jnp.asarray(pair).reshape(*(1,) * (lower.ndim - 2), size, size)
        inverse = inverse - inverse @ jnp.where(mask, lower, 0.0) @ inverse
        width *= 2
    return inverse


def _document_masks(documents: jax.Array | None, count: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return masks of the tokens of chunks, [M or 1, B or 1, 1, C, ...].

    Returns:
        Whether two tokens belong to the same document and the second is not later, [..., C, C]; whether a token belongs to the
        document of the last token before the chunk, [..., C, 1]; whether it belongs to that of the chunk's last token, [..., C, 1].
    """
    causal = jnp.tril(jnp.ones((size, size), bool))[None, None, None]
    if documents is None:
        every = jnp.ones((1, 1, 1, size, 1), jnp.float32)
        return causal, every, every
    same = documents[..., :, None] == documents[..., None, :]
    before = jnp.concatenate([documents[:1, :, :1], documents[:-1, :, -1:]])
    enters, leaves = documents == before, documents == documents[..., -1:]
    return same[:, :, None] & causal, enters[:, :, None, :, None] * 1.0, leaves[:, :, None, :, None] * 1.0


def _decayed_products(
    left: jax.Array, right: jax.Array, decay: jax.Array, total: jax.Array, mask: jax.Array
) -> jax.Array:
    """Return `sum_k left[i, k] right[j, k] exp(total[i, k] - total[j, k])` for the pairs of a mask, [M, B, H, C, C].

    All exponents are at most 0: pairs in different blocks go through the total before the later block.

    Args:
        left: [M, B, H, C, K].
        right: [M, B, H, C, K].
        decay: Decays, [M, B, H, C, K or 1].
        total: Sum of the decays up to each token, [M, B, H, C, K or 1].
        mask: bool [M or 1, B or 1, 1, C, C], False for later tokens.
    """
    if total.shape[-1] == 1:
        # Sum the decays of each pair of tokens separately, because a difference of totals would lose digits.
        between = jnp.where(jnp.tril(jnp.ones(mask.shape[-2:], bool), -1)[None, None, None], decay, 0.0)
        sums = jnp.cumsum(between, axis=-2)
        return left @ jnp.swapaxes(right, -1, -2) * jnp.exp(jnp.where(mask, sums, -jnp.inf))
    size = left.shape[-2]
    if size % BLOCK:
        return jnp.where(mask, _pairwise(left, right, total), 0.0)
    rows = []
    for begin in range(0, size, BLOCK):
        block = slice(begin, begin + BLOCK)
        columns = [_pairwise(left[..., block, :], right[..., block, :], total[..., block, :])]
        if begin:
            reference = total[..., begin - 1 : begin, :]
            late = left[..., block, :] * jnp.exp(total[..., block, :] - reference)
            early = right[..., :begin, :] * jnp.exp(reference - total[..., :begin, :])
            columns.insert(0, late @ jnp.swapaxes(early, -1, -2))
        rest = size - begin - BLOCK
        columns.append(jnp.zeros((*left.shape[:-2], BLOCK, rest), left.dtype))
        rows.append(jnp.concatenate(columns, axis=-1))
    return jnp.where(mask, jnp.concatenate(rows, axis=-2), 0.0)


def _pairwise(left: jax.Array, right: jax.Array, total: jax.Array) -> jax.Array:
    """Compute `_decayed_products` pair by pair. The result is 0 for later tokens."""
    difference = total[..., :, None, :] - total[..., None, :, :]
    causal = jnp.tril(jnp.ones((left.shape[-2],) * 2, bool))[..., None]
    decays = jnp.exp(jnp.where(causal.reshape(*(1,) * (difference.ndim - 3), *causal.shape), difference, -jnp.inf))
    return jnp.einsum("...ik,...jk,...ijk->...ij", left, right, decays)


XLA_CHUNKED = Chunked()
"""The kernel `xla-chunked`."""
