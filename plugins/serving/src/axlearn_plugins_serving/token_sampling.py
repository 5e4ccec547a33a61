"""Token sampling on devices.

Tables have a row per slot, and functions choose a token for each row of logits.

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
from axlearn_plugins_transformer.token_logprobs import MASKED_LOGIT, scale_logits, token_logprobs

GREEDY, DRAWN, FULL = 0, 1, 2
"""Kinds of sampling: greedy; with temperature, top_k, top_p and min_p; and also with bias, penalties and masks."""

OWN_LOGPROB, TOP_LOGPROBS = 1, 2
"""Levels of the report: log-probabilities of the chosen tokens, and also of the most likely tokens."""

TOP = 20
"""Maximum number of log-probabilities per token, as in OpenAI's API."""
MAX_BIAS = 300
"""Maximum number of tokens in a request's `logit_bias`, as in OpenAI's API."""
MAX_REPETITION = 1e20
"""Larger repetition penalties, and their inverses, are replaced by this one, so that logits stay finite."""
IN_PROMPT = 1 << 30
"""Added to `Tables.counts` of tokens in the prompt, if the request has a repetition penalty."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tables:
    """The sampling state of each slot. All arrays have a first axis of length A.

    Attributes:
        adapter: int32, index of the adapter, counted from 1; 0 is the base model.
        last: int32, last chosen token.
        number: int32, number of chosen tokens.
        seed: uint32.
        top_k: int32; V if there is no limit.
        temperature: float32; 0 picks the most likely token.
        top_p: float32.
        min_p: float32.
        presence: float32, presence penalty.
        frequency: float32, frequency penalty.
        repetition: float32, repetition penalty; 1 changes nothing.
        bias_tokens: int32 [A, MAX_BIAS]; unused entries are V.
        bias: float32 [A, MAX_BIAS].
        counts: int32 [A, V], number of times each token was chosen, and `IN_PROMPT`. Only updated in steps of kind `FULL`.
        mask: uint32 [A, ceil(V / 32)], tokens that may come next, in steps that use a mask.
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
    repetition: Any
    bias_tokens: Any
    bias: Any
    counts: Any
    mask: Any

    @classmethod
    def init(cls, slots: int, vocab: int) -> "Tables":
        """Return the tables of unassigned slots."""
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
            repetition=jnp.ones((slots,), jnp.float32),
            bias_tokens=jnp.full((slots, MAX_BIAS), vocab, jnp.int32),
            bias=jnp.zeros((slots, MAX_BIAS), jnp.float32),
            counts=jnp.zeros((slots, vocab), jnp.int32),
            mask=jnp.zeros((slots, -(-vocab // 32)), jnp.uint32),
        )

    def rows(self, slots: jax.Array) -> "Tables":
        """Return the rows of `slots`, int32 [L]. Slots that are out of range get an arbitrary row."""
        return jax.tree.map(lambda x: x.at[slots].get(mode="clip"), self)


class ChosenTokens(NamedTuple):
    """Chosen tokens, with log-probabilities if requested.

    Attributes:
        token: int32 [L].
        logprob: Log-probability in the model's distribution, float32 [L].
        top_tokens: int32 [L, TOP], most likely tokens, best first.
        top_logprobs: float32 [L, TOP].
        sampling_logprob: Log-probability in the distribution that the token was drawn from, float32 [L]; None if the tokens were
            not drawn.
        kept: Tokens that could be drawn, int32 [L, W], padded with -1; see `Draw.kept`. None if they are not reported.
        drafts: Tokens that the model's heads draft after the last accepted token, int32 [L, K]; None without drafts.
    """

    token: Any
    logprob: Any
    top_tokens: Any
    top_logprobs: Any
    sampling_logprob: Any = None
    kept: Any = None
    drafts: Any = None


class Draw(NamedTuple):
    """Tokens, and the distributions that they were drawn from.

    Attributes:
        token: int32 [L].
        logprob: Log-probability in the distribution that the token was drawn from, float32 [L]. 0 if the temperature is 0, or if
            log-probabilities are not computed.
        kept: Tokens that could be drawn, int32 [L, W], padded with -1. All are -1 if there were more than W, or if
            log-probabilities are not computed. None if W is 0.
    """

    token: Any
    logprob: Any
    kept: Any = None


def choose(
    logits: jax.Array,
    tables: Tables,
    slots: jax.Array,
    masked: jax.Array,
    kind: jax.Array,
    scored: jax.Array,
    width: int = 0,
) -> Draw:
    """Choose a token for each row.

    Args:
        logits: float32 [L, V].
        tables: Sampling state of all slots.
        slots: int32 [L], slot of each row.
        masked: bool [L], whether the slot's mask applies.
        kind: int32 [], kind of sampling in the step.
        scored: bool [], whether to compute log-probabilities.
        width: Maximum number W of tokens in `Draw.kept`.
    """

    def greedy(_: Any) -> Draw:
        candidates = _no_tokens(logits, width)
        return Draw(likeliest(logits), jnp.zeros(logits.shape[:1], jnp.float32), candidates)

    def sample(_: Any) -> Draw:
        return draw(logits, tables.rows(slots), scored, width)

    def full(_: Any) -> Draw:
        rows = tables.rows(slots)
        return draw(adjust_logits(logits, rows, masked), rows, scored, width)

    return lax.switch(kind, (greedy, sample, full), None)


def adjust_logits(logits: jax.Array, rows: Tables, masked: jax.Array) -> jax.Array:
    """Apply bias, penalties and masks to logits, float32 [L, V]."""
    vocab = logits.shape[1]
    logits = jax.vmap(lambda x, index, value: x.at[index].add(value, mode="drop"))(logits, rows.bias_tokens, rows.bias)
    penalty = jnp.where(rows.counts > 0, rows.repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / penalty, logits * penalty)
    counts = (rows.counts & (IN_PROMPT - 1)).astype(jnp.float32)
    logits = logits - rows.frequency[:, None] * counts - rows.presence[:, None] * jnp.minimum(counts, 1.0)
    ids = jnp.arange(vocab, dtype=jnp.int32)
    allowed = (rows.mask[:, ids // 32] >> (ids % 32).astype(jnp.uint32)[None]) & 1
    return jnp.where((allowed == 1) | ~masked[:, None], logits, MASKED_LOGIT)


def likeliest(logits: jax.Array) -> jax.Array:
    """Return the most likely token, or the first one in a tie, [L, V] -> int32 [L].

    XLA for CPU does not vectorize `jnp.argmax`.
    """
    best = jnp.max(logits, axis=-1, keepdims=True)
    token = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    highest = (logits == best) | jnp.isnan(logits)
    return jnp.min(jnp.where(highest, token, logits.shape[-1] - 1), axis=-1)


def draw(logits: jax.Array, rows: Tables, scored: jax.Array, width: int = 0) -> Draw:
    """Draw a token within the limits.

    Temperature 0 picks the most likely token.

    Args:
        logits: float32 [L, V].
        rows: Sampling state of each row.
        scored: bool [], whether to compute log-probabilities.
        width: Maximum number W of tokens in `Draw.kept`.
    """
    best, drawn = likeliest(logits), rows.temperature > 0
    scaled = scale_logits(logits, jnp.where(drawn, rows.temperature, 1.0))
    shifted = scaled - jnp.max(scaled, axis=-1, keepdims=True)
    limited = (rows.top_k < logits.shape[1]) | (rows.top_p < 1.0) | (rows.min_p > 0.0)
    mask = lax.cond(
        jnp.any(limited),
        lambda x: keep_within_limits(x, rows.top_k, rows.top_p, rows.min_p),
        lambda x: jnp.ones(x.shape, bool),
        shifted,
    )

    def noise(seed: jax.Array, number: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), number), logits.shape[1:], jnp.float32)

    noisy = jnp.where(mask, shifted, MASKED_LOGIT) + jax.vmap(noise)(rows.seed, rows.number)
    token = jnp.where(drawn, likeliest(noisy), best)

    def score(_: Any) -> jax.Array:
        return jnp.where(drawn, token_logprobs(jnp.where(mask, scaled, MASKED_LOGIT), token)[0], 0.0)

    logprob = lax.cond(scored, score, lambda _: jnp.zeros(token.shape, jnp.float32), None)
    if not width:
        return Draw(token, logprob)
    candidates = lax.cond(scored, lambda _: list_kept(scaled, mask, width), lambda _: _no_tokens(logits, width), None)
    return Draw(token, logprob, jnp.where(drawn[:, None], candidates, -1))


def list_kept(logits: jax.Array, mask: jax.Array, width: int) -> jax.Array:
    """Return the tokens of a mask, bool [L, V], as int32 [L, W], padded with -1. All are -1 if the mask has more than W tokens."""
    values, tokens = lax.top_k(jnp.where(mask, logits, -jnp.inf), min(width, logits.shape[1]))
    complete = jnp.sum(mask, axis=-1, keepdims=True) <= width
    candidates = jnp.where((values > -jnp.inf) & complete, tokens.astype(jnp.int32), -1)
    return jnp.pad(candidates, ((0, 0), (0, width - candidates.shape[1])), constant_values=-1)


def _no_tokens(logits: jax.Array, width: int) -> jax.Array | None:
    return jnp.full((logits.shape[0], width), -1, jnp.int32) if width else None


def keep_within_limits(logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Return the mask of the tokens that `top_k`, then `top_p`, then `min_p` keep, bool [L, V].

    Logits are float32 [L, V] with maximum 0.

    The smallest logit to keep is found by bisecting the float32 numbers in 32 steps, which is faster than sorting a row. Ties
    with the last token that is kept are also kept.
    """
    keys = _sortable_bits(logits)
    limit = _find_largest_key(lambda key: jnp.sum(keys >= key[:, None], axis=-1) >= top_k)
    mask = keys >= limit[:, None]
    weights = jnp.where(mask, jnp.exp(logits), 0.0)
    enough = top_p * jnp.sum(weights, axis=-1)
    limit = _find_largest_key(lambda key: jnp.sum(jnp.where(keys >= key[:, None], weights, 0.0), axis=-1) >= enough)
    mask &= (keys >= limit[:, None]) | (top_p >= 1.0)[:, None]
    # The maximum is 0, so the smallest probability to keep is exp(0) * min_p.
    return mask & (logits >= jnp.log(min_p)[:, None])


def _sortable_bits(x: jax.Array) -> jax.Array:
    """Map float32 values to uint32 values that sort in the same order."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign != 0, ~bits, bits | sign)


def _find_largest_key(enough: Any) -> jax.Array:
    """Return the largest key with `enough(key)`, uint32 [L], or 0 if there is none."""

    def halve(step: jax.Array, key: jax.Array) -> jax.Array:
        higher = key | (jnp.uint32(1) << (jnp.uint32(31) - step.astype(jnp.uint32)))
        return jnp.where(enough(higher), higher, key)

    rows = jax.eval_shape(enough, jax.ShapeDtypeStruct((1,), jnp.uint32)).shape[0]
    return lax.fori_loop(0, 32, halve, jnp.zeros((rows,), jnp.uint32))


def report(logits: jax.Array, token: jax.Array, level: jax.Array) -> ChosenTokens:
    """Return the log-probabilities of the chosen tokens and of the most likely tokens.

    Values that are not needed are zero.

    Args:
        logits: float32 [L, V].
        token: int32 [L].
        level: int32 [], 0 for nothing, `OWN_LOGPROB` for the chosen tokens, or `TOP_LOGPROBS` for the most likely tokens too.
    """
    top = min(TOP, logits.shape[1])
    empty = jnp.zeros((logits.shape[0], top), jnp.float32)

    def nothing(_: Any) -> ChosenTokens:
        return ChosenTokens(token, empty[:, 0], jnp.zeros(empty.shape, jnp.int32), empty)

    def score(_: Any) -> ChosenTokens:
        return nothing(None)._replace(logprob=token_logprobs(logits, token)[0])

    def compute(_: Any) -> ChosenTokens:
        logprob, total = token_logprobs(logits, token)
        values, tokens = lax.top_k(logits, top)
        return ChosenTokens(token, logprob, tokens.astype(jnp.int32), values - total[:, None])

    return lax.switch(level, (nothing, score, compute), None)


def record(tables: Tables, slots: jax.Array, token: jax.Array, sampled: jax.Array, kind: jax.Array) -> Tables:
    """Update the tables with the tokens of the rows that `sampled` marks."""
    rows = jnp.where(sampled, slots, tables.last.shape[0])
    counts = lax.cond(kind == FULL, lambda c: c.at[rows, token].add(1, mode="drop"), lambda c: c, tables.counts)
    return dataclasses.replace(
        tables,
        last=tables.last.at[rows].set(token, mode="drop"),
        number=tables.number.at[rows].add(1, mode="drop"),
        counts=counts,
    )


def table_row(
    sampling: Sampling, seed: int, output: Sequence[int], vocab: int, adapter: int = 0, prompt: Sequence[int] = ()
) -> Tables:
    """Return the tables' row for a request; see `Runner.assign`."""
    tokens, bias = np.full((MAX_BIAS,), vocab, np.int32), np.zeros((MAX_BIAS,), np.float32)
    for index, (token, value) in enumerate(sampling.logit_bias.items()):
        tokens[index], bias[index] = token, value
    counts = np.bincount(np.asarray(output, np.int64), minlength=vocab).astype(np.int32)
    if sampling.repetition_penalty != 1:
        counts[np.asarray(prompt, np.int64)] |= IN_PROMPT
    return Tables(
        adapter=np.int32(adapter),
        last=np.int32(output[-1] if output else 0),
        number=np.int32(len(output)),
        seed=np.uint32(seed % 2**32),
        top_k=np.int32(min(sampling.top_k or vocab, vocab)),
        temperature=np.float32(0 if sampling.is_greedy else sampling.temperature),
        top_p=np.float32(sampling.top_p),
        min_p=np.float32(sampling.min_p),
        presence=np.float32(sampling.presence_penalty),
        frequency=np.float32(sampling.frequency_penalty),
        repetition=np.float32(np.clip(sampling.repetition_penalty, 1 / MAX_REPETITION, MAX_REPETITION)),
        bias_tokens=tokens,
        bias=bias,
        counts=counts,
        mask=np.zeros((-(-vocab // 32),), np.uint32),
    )
