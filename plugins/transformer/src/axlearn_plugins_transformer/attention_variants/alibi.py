"""Attention with linear biases (Press, Smith & Lewis, 2022, "Train Short, Test Long", arXiv 2108.12409)."""

import math

import jax

from axlearn_core.config import REQUIRED, interface, node
from axlearn_core.nn.layer import Layer, Precision
from axlearn_plugins_transformer.kernels.bias import LinearBias


class Alibi(Layer):
    """A position encoding without parameters: the score of a key falls with its distance, by a slope per head.

    Queries and keys stay as they are. Distances are counted in slots of the row, so packed documents, which the mask
    keeps apart, get the distances within them, and explicit `positions` of a call are not looked at.
    """

    @node
    class Config(Layer.Config["Alibi"]):
        """Nothing to set."""

        num_heads: int = interface(default=REQUIRED)

    def __init__(self, cfg: Config, *, precision: Precision):
        super().__init__(cfg, precision=precision)

    def __call__(self, query: jax.Array, key: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B, S, N, H], [B, S, K, H] and int32 [B or 1, S] -> the same query and key."""
        return query, key

    def score_bias(self) -> LinearBias:
        """`-slope * distance`, for each of the query heads."""
        return LinearBias(slopes(self.cfg.num_heads))


def slopes(num_heads: int) -> tuple[float, ...]:
    """The slope of each head: 2^(-8/n), 2^(-16/n), ... for n heads, a power of two.

    For another number they are those of the next lower power of two, then every other one of twice that power, as in the
    authors' code.
    """
    power = 2 ** int(math.log2(num_heads))
    base = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)]
    return (*base, *between[: num_heads - power])
