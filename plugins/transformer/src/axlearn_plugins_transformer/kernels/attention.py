"""The `attention` op: scaled dot-product attention.

B batch, Q queries, K keys, N query heads, G key-value heads (N is a multiple of G), H head size, V size of a value.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.contracts.arrays import is_array
from axlearn_core.contracts.kernels import KernelContext, tags_result
from axlearn_core.kernels.op import Op, Shape
from axlearn_core.kernels.selection import choose
from axlearn_core.nn.remat import tag
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_transformer.kernels.bias import Bias
from axlearn_plugins_transformer.kernels.masks import (
    And,
    Chunks,
    Mask,
    Range,
    SlidingWindow,
    visible_keys,
    visible_pairs,
)
from axlearn_plugins_transformer.kernels.sinks import check_sinks

BLOCK = 128
MAX_BLOCKS = 64


@attrs.frozen(eq=False)
class AttentionOp(Op[Any]):
    """softmax(mask(cap(scale * query @ key) + bias)) @ value, with the softmax in float32.

    The result is [B, Q, N, V] in the dtype of the value. With `log_sum_exp`, it is a pair of this and float32 [B, Q, N]. Query
    head n reads key-value head n // (N / G).

    Attributes:
        query: [B, Q, N, H].
        key: [B, K, G, H].
        value: [B, K, G, V]. In most models, V is H.
        mask: Mask that determines which keys each query attends to. Results are unspecified for queries that see no key.
        scale: Factor applied to the queries.
        softcap: Bound on the scores, applied with a tanh: (-softcap, softcap). None does not cap them.
        bias: Bias added to the scores, or None.
        sinks: Logit of each query head for attending to nothing, [N], or None. It takes part in the softmax but has no value
            (Agarwal et al., 2025, gpt-oss).
        log_sum_exp: Whether to also return the logarithm of the softmax's denominator.
        query_slots: Slots of the queries for the mask, int32 [B or 1, Q]. None means their indices.
        key_slots: Slots of the keys for the mask, int32 [B or 1, K]. None means their indices.
    """

    name = "attention"

    query: jax.Array
    key: jax.Array
    value: jax.Array
    mask: Mask = attrs.field(kw_only=True)
    scale: float = attrs.field(kw_only=True)
    softcap: float | None = attrs.field(default=None, kw_only=True)
    bias: Bias | None = attrs.field(default=None, kw_only=True)
    sinks: jax.Array | None = attrs.field(default=None, kw_only=True)
    log_sum_exp: bool = attrs.field(default=False, kw_only=True)
    query_slots: jax.Array | None = attrs.field(default=None, kw_only=True)
    key_slots: jax.Array | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_sinks(self)

    def compute_context(self, kernel: str | None = None) -> jax.Array:
        """Run the op without `log_sum_exp`, constrain the heads to the mesh rules, and tag the result as `context`.

        A kernel with a `tags_result` attribute has already tagged it; a second tag would save the array twice.
        """
        call: Any = self  # pyright treats the class variable `name` as an instance variable
        chosen: Any = choose(call, kernel)
        return self.tag_context(chosen(call), tagged=tags_result(chosen))

    @staticmethod
    def tag_context(result: jax.Array, *, tagged: bool = False) -> jax.Array:
        """Constrain and tag an attention output [B, Q, N, V] as `context` does."""
        result = constrain(result, "batch", "sequence", "activation_heads", None)
        return result if tagged else tag(result, "context")

    @property
    def aligned(self) -> bool:
        """True if query i and key i have the same position."""
        return self.query_slots is None and self.key_slots is None and self.query.shape[1] == self.key.shape[1]

    @property
    def skips(self) -> bool:
        """True if the mask hides whole blocks."""
        starts = range(0, self.key.shape[1], BLOCK) if self.aligned else ()
        return any(self.mask.block((i, i + BLOCK), (j, j + BLOCK)) is False for i in starts for j in starts)

    def operands(self) -> Mapping[str, Any]:
        """Return queries, keys and values, and sinks if there are any."""
        sinks = {} if self.sinks is None else {"sinks": self.sinks}
        return {"query": self.query, "key": self.key, "value": self.value, **sinks}

    def extras(self) -> tuple[str, ...]:
        """Return `sinks` and `log_sum_exp` if the call uses them."""
        return (*(["sinks"] if self.sinks is not None else []), *(["log_sum_exp"] if self.log_sum_exp else []))

    def options(self) -> Mapping[str, Any]:
        """Return the options, with mask and bias described by their structure."""
        return {
            "mask": self.mask.describe(),
            "softcap": self.softcap,
            "bias": None if self.bias is None else self.bias.describe(),
            "aligned": self.aligned,
            "skips": self.skips,
            **({"log_sum_exp": True} if self.log_sum_exp else {}),
        }

    def flops(self) -> float:
        """Count two matmuls for all pairs of positions, including masked pairs."""
        batch, queries, heads, size = self.query.shape
        return 2.0 * batch * heads * queries * self.key.shape[1] * (size + self.value.shape[3])

    def visible(self) -> float:
        """Return the share of position pairs that the mask leaves visible."""
        queries, keys = self.query.shape[1], self.key.shape[1]
        return visible_pairs(self.mask, queries, keys) if self.aligned else visible_keys(self.mask, keys)

    def kernel_flops(self, operands: Sequence[Shape], results: Sequence[Shape], *, opaque: bool) -> float | None:
        """Count the FLOPs of a forward or backward launch from its arrays [B, T, H, D]."""
        arrays = [shape for shape in operands if len(shape) == 4]
        if not opaque or len(arrays) < 3:
            return None
        (batch, length, heads, size), key, value = arrays[:3]
        # A forward launch has no gradient operand. A backward launch computes all gradients, the query's, or the other two.
        products = 2 if len(arrays) == 3 else {0: 5, 1: 3, 2: 4}[len(results)]
        return 1.0 * products * batch * length * heads * key[1] * (size + value[3])

    def resize(self, sizes: Mapping[int, int]) -> Self:
        """Shrink windows and chunks along with the number of keys, so that they still hide some keys."""
        op, length = super().resize(sizes), self.key.shape[1]
        scale = op.key.shape[1] / length

        def shrink(part: Any) -> Mask:
            kind = type(part)
            return (
                kind(max(2, round(part.size * scale)), *jax.tree.leaves(part))
                if kind in (SlidingWindow, Chunks)
                else part
            )

        parts = tuple(map(shrink, op.mask.parts))
        return attrs.evolve(op, mask=And(parts)) if parts != tuple(op.mask.parts) else op

    def sample(self, rng: np.random.Generator) -> Self:
        """Sample a mask with a few documents in each row, prefixes of up to half a row, and any selected keys."""

        def ids(x: Any) -> Any:
            if not is_array(x) or not jnp.issubdtype(x.dtype, jnp.integer):
                return x
            if len(x.shape) < 2:
                return jnp.asarray(rng.integers(1, max(2, self.key.shape[1] // 2), x.shape), x.dtype)
            if len(x.shape) > 2:
                return jnp.asarray(rng.integers(0, self.key.shape[1], x.shape), x.dtype)
            starts = np.random.default_rng(0).random(x.shape) < 3 / x.shape[-1]  # the same for queries and keys
            return jnp.asarray(1 + np.cumsum(starts, axis=-1), x.dtype)

        slots = {
            name: None if x is None else jnp.broadcast_to(jnp.arange(x.shape[-1], dtype=x.dtype), x.shape)
            for name, x in (("query_slots", self.query_slots), ("key_slots", self.key_slots))
        }
        return attrs.evolve(super().sample(rng), mask=jax.tree.map(ids, self.mask), **slots)

    def reference(self) -> Any:
        """Compute all scores at once."""
        query, key, value = self.query, self.key, self.value
        queries, keys = (0, query.shape[1]), (0, key.shape[1])
        visible = self.mask.materialize(queries, keys, self.query_slots, self.key_slots)
        bias = None if self.bias is None else self.bias.materialize(queries, keys, self.query_slots, self.key_slots)
        if self.query_slots is None or query.shape[1] > 1 or query.shape[2] == key.shape[2]:
            q, k, v = _group_heads(query, key, value, self.scale)
            sinks = None if self.sinks is None else self.sinks[:, None]
            return self.shaped(*_attend(q, k, v, visible[:, None], self, bias, sinks))
        # In decoding, the query heads of a group replace the query axis, so keys are not repeated.
        batch, _, heads, size = query.shape
        groups = (key.shape[2], heads // key.shape[2])
        q = (query * self.scale).reshape(batch, *groups, size)
        if bias is not None:
            bias = bias.reshape(bias.shape[0], *groups, key.shape[1])
        sinks = None if self.sinks is None else self.sinks.reshape(groups)
        out, log_sum_exp = _attend(
            q, jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2), visible[:, None], self, bias, sinks
        )
        log_sum_exp = None if log_sum_exp is None else log_sum_exp.reshape(batch, heads, 1)
        return self.shaped(out.reshape(batch, heads, 1, value.shape[3]), log_sum_exp)

    def shaped(self, out: jax.Array, log_sum_exp: jax.Array | None) -> Any:
        """Return the result of [B, N, Q, V], and [B, N, Q] if the op returns it."""
        result = jnp.swapaxes(out, 1, 2)
        return result if log_sum_exp is None else (result, jnp.swapaxes(log_sum_exp, 1, 2))


def _group_heads(query: jax.Array, key: jax.Array, value: jax.Array, scale: float) -> tuple[jax.Array, ...]:
    """Scale the queries and move the heads forward.

    Return queries [B, N, Q, H], and keys and values [B, N, K, H] repeated to the query heads.
    """
    repeats = query.shape[2] // key.shape[2]
    if repeats > 1:
        key, value = jnp.repeat(key, repeats, axis=2), jnp.repeat(value, repeats, axis=2)
    return jnp.swapaxes(query * scale, 1, 2), jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array | None,
    op: AttentionOp,
    bias: jax.Array | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Attend: [..., Q, H], [..., K, H], [..., K, V] -> [..., Q, V], and the log-sum-exp [..., Q] if the op returns it.

    The mask is [B or 1, 1..., Q, K], the bias [B or 1, ..., Q, K]. The sinks broadcast to [..., Q].
    """
    softcap = op.softcap
    scores = jnp.einsum("...td,...sd->...ts", q, k).astype(jnp.float32)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = jnp.where(visible, scores, -1e30)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
        log_sum_exp = jax.nn.logsumexp(scores, axis=-1) if op.log_sum_exp else None
    else:
        log_sum_exp = jax.nn.logsumexp(scores, axis=-1)
        log_sum_exp = jnp.logaddexp(log_sum_exp, jnp.broadcast_to(sinks.astype(jnp.float32), log_sum_exp.shape))
        weights = jnp.exp(scores - log_sum_exp[..., None])
    return jnp.einsum("...ts,...sd->...td", weights.astype(v.dtype), v), log_sum_exp if op.log_sum_exp else None


class _XLABlocked:
    """Attends with one block of queries at a time.

    The keys range from the first to the last visible block.
    """

    def supports(self, op: AttentionOp, context: KernelContext) -> str | None:
        """Support self-attention with a mask that hides whole blocks."""
        length = op.query.shape[1]
        if not op.aligned:
            return "queries and keys are not the same positions"
        if length % BLOCK:
            return f"the sequence length {length} is not a multiple of {BLOCK}"
        if length // BLOCK > MAX_BLOCKS:
            return f"the sequence length {length} needs more than {MAX_BLOCKS} blocks, and each block is compiled separately"
        return None if op.skips else f"the mask ({op.mask.describe()}) does not hide any whole block"

    def __call__(self, op: AttentionOp) -> Any:
        """Return the result of the op."""
        q, k, v = _group_heads(op.query, op.key, op.value, op.scale)
        sinks = None if op.sinks is None else op.sinks[:, None]
        parts = []
        for start in range(0, op.query.shape[1], BLOCK):
            rows = (start, start + BLOCK)
            low, high = _visible_keys(op.mask, rows, op.key.shape[1])
            visible = None if op.mask.block(rows, (low, high)) else op.mask.materialize(rows, (low, high))[:, None]
            bias = None if op.bias is None else op.bias.materialize(rows, (low, high))
            parts.append(_attend(q[:, :, slice(*rows)], k[:, :, low:high], v[:, :, low:high], visible, op, bias, sinks))
        outs, sums = zip(*parts, strict=True)
        return op.shaped(jnp.concatenate(outs, axis=2), jnp.concatenate(sums, axis=2) if op.log_sum_exp else None)


def _visible_keys(mask: Mask, rows: Range, length: int) -> Range:
    """Return the range of keys that the queries `rows` may see, in whole blocks."""
    starts = [j for j in range(0, length, BLOCK) if mask.block(rows, (j, j + BLOCK)) is not False]
    return (starts[0], starts[-1] + BLOCK) if starts else (0, BLOCK)


XLA_BLOCKED = _XLABlocked()
