"""A linear map with quantized matmuls for training."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import node, setting
from axlearn_core.errors import Problem
from axlearn_core.nn.layer import Precision, expand_to
from axlearn_core.nn.linear import Linear
from axlearn_core.nn.sharding import is_sharded
from axlearn_plugins_quantization.library import (
    Format,
    Rule,
    delayed_product,
    grouped_product,
    product,
    unsupported_for_experts,
)


class Magnitudes(nnx.Variable):
    """The largest magnitudes of an operand in the latest microbatches, float32 [history], newest first and initially 0."""


class QuantizedLinear(Linear):
    """`x @ weight + bias` with a quantized matmul.

    The parameters are the same as `Linear`'s, in their own dtype. Each step quantizes activations and weights by their largest
    magnitude, with a scale per token and a scale per output. Gradients pass through the rounding unchanged.

    With `history`, there is a single scale for all activations and a single scale for all weights, from their largest
    magnitudes in the latest training microbatches (delayed scaling; Micikevicius et al., arXiv 2209.05433). Larger values
    saturate. Gradients also have a single scale, but it comes from their current largest magnitude.
    """

    @node
    class Config(Linear.Config):
        """Dtypes and scales of the matmul. See `library.Rule`.

        Attributes:
            history: Number of microbatches for delayed scaling. None scales each microbatch by its own magnitudes.
        """

        weights: Format = "int8"
        activations: Format | None = "int8"
        gradients: Format | None = "int8"
        tile_size: int | None = setting(default=None, ge=1)
        history: int | None = setting(default=None, ge=1, hide_default=True)

        def validate(self) -> Iterable[Problem]:
            """Report quantized gradients without quantized activations, and conflicting kinds of scales."""
            yield from super().validate()
            if self.gradients is not None and self.activations is None:
                yield Problem(
                    path="gradients",
                    message="needs quantized activations",
                    fix="set activations, or set gradients to null",
                )
            if self.history is not None and (self.activations is None or self.tile_size is not None):
                yield Problem(
                    path="history",
                    message="needs one scale for all activations and one for all weights",
                    got="no quantized activations" if self.activations is None else f"tile_size {self.tile_size}",
                    fix="set activations and remove tile_size, or set history to null",
                )

    def __init__(self, cfg: Config, *, axes: Sequence[str | None], rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, axes=axes, rngs=rngs, precision=precision)
        if cfg.history is not None:
            self.batch_dependence = "uses the largest magnitude in the batch"
            self.use_running_average = False  # flax sets it in evaluation
            self.activation_magnitudes = Magnitudes(jnp.zeros(cfg.history, jnp.float32))
            self.weight_magnitudes = Magnitudes(jnp.zeros(cfg.history, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., *input_dims] -> [..., *output_dims]."""
        cfg: Any = self.cfg
        count = len(cfg.input_dims)
        x, weight = x.astype(self.precision.compute), self.computed(self.weight)
        rule, magnitudes = self._rule(), self._magnitudes(x, weight)
        quantized = delayed_product if magnitudes else product
        if is_sharded() or cfg.tile_size is not None:
            y = quantized(rule, contraction_dims(x.ndim, count))(x, weight, *magnitudes)
        else:  # as one matrix, like Linear
            inner = math.prod(cfg.input_dims)
            y = quantized(rule, contraction_dims(2, 1))(x.reshape(-1, inner), weight.reshape(inner, -1), *magnitudes)
            y = y.reshape(*x.shape[:-count], *cfg.output_dims)
        return y + expand_to(self.computed(self.bias), y.ndim) if cfg.bias else y

    def _rule(self) -> Rule:
        cfg: Any = self.cfg
        return Rule(cfg.weights, cfg.activations, cfg.gradients, cfg.tile_size)

    def _magnitudes(self, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, ...]:
        """Return the magnitudes that scale activations and weights, and update the history. Return () if there is no history."""
        if self.cfg.history is None:
            return ()
        return self._largest(self.activation_magnitudes, x), self._largest(self.weight_magnitudes, weight)

    def _largest(self, magnitudes: Magnitudes, array: jax.Array) -> jax.Array:
        """Return the largest magnitude of the history, or of `array` if it is empty. In training, add `array`'s to the history."""
        history = magnitudes[...]
        newest = jax.lax.stop_gradient(jnp.max(jnp.abs(array)).astype(jnp.float32))
        if not self.use_running_average:
            magnitudes[...] = jnp.concatenate([newest[None], history[:-1]])
        largest = jnp.max(history)
        return jnp.where(largest > 0, largest, newest)

    def grouped(self, x: jax.Array, product: Any) -> jax.Array:
        """See `Linear.grouped`. When group sizes vary, the weights of all groups share one scale per output.

        Raises:
            RequestError: The config does not support quantized grouped matmuls.
        """
        cfg: Any = self.cfg
        if cfg.history is not None:
            raise unsupported_for_experts(f"the history of {cfg.history} steps", "one scale would not fit all experts")
        x, weight = x.astype(self.precision.compute), self.computed(self.weight)
        y = grouped_product(self._rule(), x, weight, product)
        return y + product.spread(self.computed(self.bias), y) if cfg.bias else y


def contraction_dims(rank: int, count: int) -> Any:
    """Return the dimension numbers of [..., *input_dims] (with `rank` dimensions) times [*input_dims, ...]."""
    return (tuple(range(rank - count, rank)), tuple(range(count))), ((), ())
