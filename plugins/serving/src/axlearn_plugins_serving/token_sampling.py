"""How tokens are chosen on devices: tables with a row per slot, and a choice for each row of logits.

Legend: L rows of logits, V vocabulary, A slots.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from axlearn_plugins_serving.contracts import Sampling

GREEDY, DRAWN, FULL = 0, 1, 2
"""What a step's rows need: the likeliest token; temperature, top_k, top_p and min_p; bias, penalties and masks too."""

TOP = 20
"""The most log-probabilities that a request gets per token, as in OpenAI's API."""
MAX_BIAS = 300
"""The most tokens with a bias of their own, as in OpenAI's API."""
LOW = -1e30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tables:
    """What the runner knows of each slot. All have a first axis of A.

    Attributes:
        adapter: int32, counted from 1; 0 is the base.
        last: int32, the token that was chosen last.
        number: int32, how many tokens were chosen.
        seed: uint32.
        top_k: int32; V where there is no limit.
        temperature: float32; 0 takes the likeliest token.
        top_p: float32.
        min_p: float32.
        presence: float32, the presence penalty.
        frequency: float32, the frequency penalty.
        bias_tokens: int32 [A, MAX_BIAS]; V where there is none.
        bias: float32 [A, MAX_BIAS].
        counts: int32 [A, V], how often each token was chosen; kept for rows of `FULL` alone.
        mask: uint32 [A, ceil(V / 32)], the tokens that may be chosen next, where a step says so.
    """

    adapter: Any
    last: Any
    number: Any
    seed: Any
    top_k: Any
    temperature: Any
    top_p: Any
    min_p: Any
    presence: Any
    frequency: Any
    bias_tokens: Any
    bias: Any
    counts: Any
    mask: Any

    @classmethod
    def init(cls, slots: int, vocab: int) -> "Tables":
        """Of slots that nobody has."""
        whole, real = jnp.zeros((slots,), jnp.int32), jnp.zeros((slots,), jnp.float32)
        return cls(
            adapter=whole,
            last=whole,
            number=whole,
            seed=jnp.zeros((slots,), jnp.uint32),
            top_k=jnp.full((slots,), vocab, jnp.int32),
            temperature=real,
            top_p=jnp.ones((slots,), jnp.float32),
            min_p=real,
            presence=real,
            frequency=real,
            bias_tokens=jnp.full((slots, MAX_BIAS), vocab, jnp.int32),
            bias=jnp.zeros((slots, MAX_BIAS), jnp.float32),
            counts=jnp.zeros((slots, vocab), jnp.int32),
            mask=jnp.zeros((slots, -(-vocab // 32)), jnp.uint32),
        )

    def rows(self, slots: jax.Array) -> "Tables":
        """The rows of some slots int32 [L]; any row for a slot that does not exist."""
        return jax.tree.map(lambda x: x.at[slots].get(mode="clip"), self)


class Chosen(NamedTuple):
    """What a step chose: tokens, and their log-probabilities in the model's own distribution where asked for.

    Attributes:
        token: int32 [L].
        logprob: float32 [L].
        top_tokens: int32 [L, TOP], the likeliest, best first.
        top_logprobs: float32 [L, TOP].
    """

    token: Any
    logprob: Any
    top_tokens: Any
    top_logprobs: Any


def choose(logits: jax.Array, tables: Tables, slots: jax.Array, masked: jax.Array, kind: jax.Array) -> jax.Array:
    """float32 [L, V], a slot and whether its mask holds (bool) for each row, and the kind of the step -> int32 [L]."""

    def greedy(_: Any) -> jax.Array:
        return likeliest(logits)

    def drawn(_: Any) -> jax.Array:
        return draw(logits, tables.rows(slots))

    def full(_: Any) -> jax.Array:
        rows = tables.rows(slots)
        return draw(adjusted(logits, rows, masked), rows)

    return lax.switch(kind, (greedy, drawn, full), None)


def adjusted(logits: jax.Array, rows: Tables, masked: jax.Array) -> jax.Array:
    """float32 [L, V] with bias and penalties, and without the tokens that a mask excludes."""
    vocab = logits.shape[1]
    logits = jax.vmap(lambda x, at, value: x.at[at].add(value, mode="drop"))(logits, rows.bias_tokens, rows.bias)
    counts = rows.counts.astype(jnp.float32)
    logits = logits - rows.frequency[:, None] * counts - rows.presence[:, None] * jnp.minimum(counts, 1.0)
    ids = jnp.arange(vocab, dtype=jnp.int32)
    allowed = (rows.mask[:, ids // 32] >> (ids % 32).astype(jnp.uint32)[None]) & 1
    return jnp.where((allowed == 1) | ~masked[:, None], logits, LOW)


def likeliest(logits: jax.Array) -> jax.Array:
    """[L, V] -> int32 [L]: the first of the highest, as `jnp.argmax`, whose one pass XLA for CPU computes number by number."""
    best = jnp.max(logits, axis=-1, keepdims=True)
    token = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    highest = (logits == best) | jnp.isnan(logits)
    return jnp.min(jnp.where(highest, token, logits.shape[-1] - 1), axis=-1)


def draw(logits: jax.Array, rows: Tables) -> jax.Array:
    """float32 [L, V] -> int32 [L]: the likeliest token at temperature 0, else one of those that the limits leave."""
    best = likeliest(logits)
    heated = logits / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    heated = heated - jnp.max(heated, axis=-1, keepdims=True)
    heated = limited(heated, rows.top_k, rows.top_p, rows.min_p)

    def noise(seed: jax.Array, number: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), number), logits.shape[1:], jnp.float32)

    token = likeliest(heated + jax.vmap(noise)(rows.seed, rows.number))
    return jnp.where(rows.temperature > 0, token, best)


def limited(logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """float32 [L, V], whose maximum is 0, without what the limits exclude: `top_k`, of that `top_p`, of that `min_p`.

    The least logit that stays is found by halving the range of float32 numbers, 32 times: sorting a row takes longer.
    Tokens as likely as the last one that stays, stay too.
    """
    keys = _sortable_bits(logits)
    limit = _least(lambda key: jnp.sum(keys >= key[:, None], axis=-1) >= top_k)
    mask = keys >= limit[:, None]
    weights = jnp.where(mask, jnp.exp(logits), 0.0)
    enough = top_p * jnp.sum(weights, axis=-1)
    limit = _least(lambda key: jnp.sum(jnp.where(keys >= key[:, None], weights, 0.0), axis=-1) >= enough)
    mask &= (keys >= limit[:, None]) | (top_p >= 1.0)[:, None]
    # The maximum is 0, and exp(0) times min_p is the least probability that stays.
    mask &= logits >= jnp.log(min_p)[:, None]
    return jnp.where(mask, logits, LOW)


def _sortable_bits(x: jax.Array) -> jax.Array:
    """float32 as uint32 in the same order."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign != 0, ~bits, bits | sign)


def _least(enough: Any) -> jax.Array:
    """uint32 [L]: the greatest key for which `enough(key)` holds; 0 where it holds for none."""

    def halve(step: jax.Array, key: jax.Array) -> jax.Array:
        higher = key | (jnp.uint32(1) << (jnp.uint32(31) - step.astype(jnp.uint32)))
        return jnp.where(enough(higher), higher, key)

    rows = jax.eval_shape(enough, jax.ShapeDtypeStruct((1,), jnp.uint32)).shape[0]
    return lax.fori_loop(0, 32, halve, jnp.zeros((rows,), jnp.uint32))


def report(logits: jax.Array, token: jax.Array, needed: jax.Array) -> Chosen:
    """float32 [L, V], int32 [L] -> the log-probabilities of the tokens and of the likeliest, where `needed` (bool [])."""
    top = min(TOP, logits.shape[1])

    def compute(_: Any) -> Chosen:
        total = jax.nn.logsumexp(logits, axis=-1)
        logprob = jnp.take_along_axis(logits, token[:, None], axis=-1, mode="clip")[:, 0] - total
        values, tokens = lax.top_k(logits, top)
        return Chosen(token, logprob, tokens.astype(jnp.int32), values - total[:, None])

    def nothing(_: Any) -> Chosen:
        real = jnp.zeros((logits.shape[0], top), jnp.float32)
        return Chosen(token, real[:, 0], jnp.zeros(real.shape, jnp.int32), real)

    return lax.cond(needed, compute, nothing, None)


def record(tables: Tables, slots: jax.Array, token: jax.Array, sampled: jax.Array, kind: jax.Array) -> Tables:
    """The tables after these choices, of the rows that `sampled`."""
    to = jnp.where(sampled, slots, tables.last.shape[0])
    counts = lax.cond(kind == FULL, lambda c: c.at[to, token].add(1, mode="drop"), lambda c: c, tables.counts)
    return dataclasses.replace(
        tables,
        last=tables.last.at[to].set(token, mode="drop"),
        number=tables.number.at[to].add(1, mode="drop"),
        counts=counts,
    )


def table_row(sampling: Sampling, seed: int, output: Sequence[int], vocab: int, adapter: int = 0) -> Tables:
    """The row of a request in the tables."""
    tokens, bias = np.full((MAX_BIAS,), vocab, np.int32), np.zeros((MAX_BIAS,), np.float32)
    for index, (token, value) in enumerate(sampling.logit_bias.items()):
        tokens[index], bias[index] = token, value
    return Tables(
        adapter=np.int32(adapter),
        last=np.int32(output[-1] if output else 0),
        number=np.int32(len(output)),
        seed=np.uint32(seed % 2**32),
        top_k=np.int32(min(sampling.top_k or vocab, vocab)),
        temperature=np.float32(sampling.temperature),
        top_p=np.float32(sampling.top_p),
        min_p=np.float32(sampling.min_p),
        presence=np.float32(sampling.presence_penalty),
        frequency=np.float32(sampling.frequency_penalty),
        bias_tokens=tokens,
        bias=bias,
        counts=np.bincount(np.asarray(output, np.int64), minlength=vocab).astype(np.int32),
        mask=np.zeros((-(-vocab // 32),), np.uint32),
    )
