"""Attention with linear biases (ALiBi).

See Press, Smith & Lewis, 2022, "Train Short, Test Long" (arXiv 2108.12409).
"""

import math

import jax

from axlearn_core.config import REQUIRED, interface, node
from axlearn_core.nn.layer import Layer, Precision
from axlearn_plugins_transformer.kernels.bias import LinearBias


class Alibi(Layer):
    """A position encoding that lowers the score of a key linearly with its distance.

    It has no parameters. Each head has its own slope. Queries and keys do not change. Distances are counted in slots of
    the row, so they are also correct within packed documents. Explicit `positions` are ignored.
    """

    @node
    class Config(Layer.Config["Alibi"]):
        """A config without settings."""

        num_heads: int = interface(default=REQUIRED)

    def __init__(self, cfg: Config, *, precision: Precision):
        super().__init__(cfg, precision=precision)

    def __call__(self, query: jax.Array, key: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the query [B, S, N, H] and key [B, S, K, H] unchanged."""
        return query, key

    def score_bias(self) -> LinearBias:
        """Return the bias `-slope * distance` of each query head."""
        return LinearBias(slopes(self.cfg.num_heads))


def slopes(num_heads: int) -> tuple[float, ...]:
    """Return the slope of each head.

    For n heads, the slopes are 2^(-8/n), 2^(-16/n), ... if n is a power of two. Otherwise, they are the slopes
    for the next lower power of two, followed by every other slope for twice that power, as in the authors' code.
    """
    power = 2 ** int(math.log2(num_heads))
    base = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)]
    return (*base, *between[: num_heads - power])
