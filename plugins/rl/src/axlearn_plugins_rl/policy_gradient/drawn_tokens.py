"""The targets of a training batch that the policy drew, and sums over the sequences that they belong to.

Shapes: R rows, S positions per row. A sequence is one trajectory: consecutive positions of a row with the same segment id.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.contracts.parts import Batch
from axlearn_plugins_transformer.causal_lm import LAYER_ENTRIES

MAX_LOG_RATIO = 20.0
"""Log-ratios are limited to this magnitude, so that a ratio does not overflow."""

ROLLOUT_ENTRIES = ("advantages", "rollout_logprobs", "rewards", "rollout_values", "temperature", "kept_tokens")


def select_model_inputs(batch: Batch, *, layers: bool = False) -> dict[str, Any]:
    """Return the entries of a training batch that a model reads, without the facts about the rollouts.

    Args:
        batch: The batch.
        layers: Whether to include the inputs of the layers, such as recorded experts, which are those of the policy.
    """
    inputs = {name: x for name, x in batch.items() if name not in ROLLOUT_ENTRIES}
    return {name: x for name, x in inputs.items() if layers or not name.startswith(LAYER_ENTRIES)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences:
    """The sequences of a batch.

    Attributes:
        mask: 1 for targets that the policy drew and that are trained on, else 0. float32 [R, S].
        link: 1 if the next position belongs to the same sequence, else 0. float32 [R, S].
    """

    mask: jax.Array
    link: jax.Array

    @classmethod
    def from_batch(cls, batch: Batch) -> "Sequences":
        """Find the sequences of a batch with `weights` and, if rows have more than one sequence, `segment_ids`."""
        mask = (batch["weights"] > 0).astype(jnp.float32)
        ids = batch.get("segment_ids")
        ids = jnp.ones(mask.shape, jnp.int32) if ids is None else ids
        same = (ids[:, 1:] == ids[:, :-1]).astype(jnp.float32)
        return cls(mask=mask, link=jnp.pad(same, ((0, 0), (0, 1))))

    def sum(self, values: jax.Array) -> jax.Array:
        """Return at each position the sum over the trained targets of its sequence, float32 [R, S]."""
        sums = self._scan_forward(values * self.mask)
        return _scan(jnp.where(self.link > 0, 0.0, sums), self.link, reverse=True)

    def count(self) -> jax.Array:
        """Return at each position the number of trained targets in its sequence, at least 1, float32 [R, S]."""
        return jnp.maximum(self.sum(jnp.ones_like(self.mask)), 1.0)

    def number(self) -> jax.Array:
        """Return the number of sequences that have trained targets, a float32 scalar."""
        before = self._scan_forward(self.mask)
        return jnp.sum(jnp.where(before == 1, self.mask, 0.0))

    def sum_from_here(self, values: jax.Array, discount: float = 1.0) -> jax.Array:
        """Return at each position the discounted sum over this and the later trained targets of its sequence.

        The discount applies to each trained target. Tokens between them, such as the results of tools, do not count.
        """
        keep = self.link * (self.mask * discount + (1.0 - self.mask))
        return _scan(values * self.mask, keep, reverse=True)

    def next_value(self, values: jax.Array) -> jax.Array:
        """Return at each position the value at the next trained target of its sequence, or 0 at the last one."""
        nearest = _scan(values * self.mask, (1.0 - self.mask) * self.link, reverse=True)
        return self.link * jnp.pad(nearest[:, 1:], ((0, 0), (0, 1)))

    def _scan_forward(self, values: jax.Array) -> jax.Array:
        return _scan(values, jnp.pad(self.link[:, :-1], ((0, 0), (1, 0))), reverse=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnTokens:
    """The targets of a batch, as the terms of the loss see them. All arrays are float32 [R, S].

    Attributes:
        logprobs: Log-probabilities in the distribution of the trained model at the temperature of the rollouts, with gradients.
            0 for targets that are not trained on.
        rollout_logprobs: Log-probabilities in the distribution that the targets were drawn from, else 0.
        advantages: Advantages.
        weights: Weights in the mean.
        sequences: The sequences of the targets.
    """

    logprobs: jax.Array
    rollout_logprobs: jax.Array
    advantages: jax.Array
    weights: jax.Array
    sequences: Sequences

    @property
    def mask(self) -> jax.Array:
        """1 for targets that are trained on, else 0."""
        return self.sequences.mask

    def log_ratios(self, base: str) -> jax.Array:
        """Subtract the log-probabilities of a base, float32 [R, S].

        Args:
            base: `rollout` for the log-probabilities of the rollouts. `current` for those of the trained model: the result is 0,
                and its gradient is that of the log-probabilities.
        """
        other = self.rollout_logprobs if base == "rollout" else lax.stop_gradient(self.logprobs)
        return self.logprobs - other


def exp_limited(log_ratios: jax.Array) -> jax.Array:
    """Return the exponential of log-ratios, which are limited to `MAX_LOG_RATIO`."""
    return jnp.exp(jnp.clip(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _scan(values: jax.Array, keep: jax.Array, *, reverse: bool) -> jax.Array:
    """Solve `x[t] = values[t] + keep[t] * x[t - 1]` along a row, or with `x[t + 1]` if `reverse` is set."""

    def combine(first: Any, second: Any) -> Any:
        return first[0] * second[0], second[1] + second[0] * first[1]

    return lax.associative_scan(combine, (keep, values), reverse=reverse, axis=1)[1]
