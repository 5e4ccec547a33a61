"""`Summary`: a statistic that can be combined across layers, microbatches, and batches.

Shapes: B rows, S positions. Padding never counts; see `axlearn_core.nn.padding`.
"""

import dataclasses
from typing import Any, Literal, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.nn import padding

Kind = Literal["mean", "max", "sum"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Summary:
    """A mean, maximum, or sum. If value and weight are zero, it is empty, and merging it has no effect.

    Attributes:
        value: Float32 scalar.
        weight: Float32 scalar, the number of items.
        kind: How values are combined. Means are weighted.
        over: Plural name of the items: "tokens", "rows", "pairs".
    """

    value: jax.Array
    weight: jax.Array
    kind: Kind = dataclasses.field(default="mean", metadata={"static": True})
    over: str = dataclasses.field(default="targets", metadata={"static": True})

    def __str__(self) -> str:
        return f"{self.kind} over {self.over}"

    def __float__(self) -> float:
        return float(self.value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.value, dtype)

    def reduced(self) -> "Summary":
        """Combine N summaries whose fields are arrays [N]. With equal weights, a mean is bit-identical to `jnp.mean`."""
        value, weight = self.value, self.weight
        total = jnp.sum(weight, axis=0)
        if self.kind == "max":
            value = jnp.where(total > 0, jnp.max(jnp.where(weight > 0, value, -jnp.inf), axis=0), 0)
        elif self.kind == "sum":
            value = jnp.sum(value, axis=0)
        else:
            value = jnp.mean(value * (weight * weight.shape[0] / jnp.where(total > 0, total, 1.0)), axis=0)
        return dataclasses.replace(self, value=value, weight=total)

    def merged(self, other: "Summary") -> "Summary":
        """Combine two summaries."""
        return jax.tree.map(lambda a, b: jnp.stack([a, b]), self, other).reduced()


def is_summary(value: Any) -> TypeGuard[Summary]:
    """Return True if a reported value is a `Summary`."""
    return isinstance(value, Summary)


def mean_over_tokens(values: jax.Array) -> Summary:
    """Average values [B, S] over all tokens, so that long rows count more than short ones."""
    return Summary(padding.mean(values).astype(jnp.float32), padding.count(values), "mean", "tokens")


def mean_over_rows(values: jax.Array) -> Summary:
    """Average over the tokens of each row, then over rows, so that all rows count equally.

    Args:
        values: Values [B, S], or one value per row [B]. Rows that contain only padding do not count.
    """
    if values.ndim == 2:
        real = padding.tokens(*values.shape)
        means = jnp.mean(values if real is None else jnp.where(real, values, 0), axis=1)
        values = means if real is None else means * padding.correction(real, axis=1)
    counted = padding.rows(values.shape[0])
    if counted is None:
        value, weight = jnp.mean(values), jnp.float32(values.size)
    else:
        value, weight = padding.masked_mean(values, counted), jnp.sum(counted, dtype=jnp.float32)
    return Summary(value.astype(jnp.float32), weight, "mean", "rows")


def maximum(values: jax.Array) -> Summary:
    """Return the maximum of values [B, S] over all tokens."""
    real = padding.tokens(*values.shape)
    weight, values = padding.count(values), values.astype(jnp.float32)
    if real is not None:
        values = jnp.where(real, values, -jnp.inf)
    return Summary(jnp.where(weight > 0, jnp.max(values), 0), weight, "max", "tokens")


def total(values: jax.Array) -> Summary:
    """Sum values [B, S] over all tokens, and also over microbatches and over the layers of a stack."""
    real = padding.tokens(*values.shape)
    values = values if real is None else jnp.where(real, values, 0)
    return Summary(jnp.sum(values, dtype=jnp.float32), padding.count(values), "sum", "tokens")
