"""A linear map that is trained with quantized products."""

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
    without_experts,
)


class Magnitudes(nnx.Variable):
    """The largest magnitudes of an operand in the latest microbatches, float32 [history], newest first; 0 where there was none."""


class QuantizedLinear(Linear):
    """`x @ weight + bias`, where the product is one of quantized numbers.

    The parameters are those of `Linear`, in their own dtype: weights and activations are quantized anew in each step, by
    their largest magnitude; each token and each output has a scale of its own. Gradients pass through the rounding.

    With `history` there is one scale for all activations and one for all weights, from their largest magnitudes in the
    latest microbatches of training (delayed scaling; Micikevicius et al., arXiv 2209.05433): what is larger than those
    saturates. Gradients have one scale too, from their own largest magnitude, which is known only when they are.
    """

    @node
    class Config(Linear.Config):
        """The formats; see `library.Rule`."""

        weights: Format = "int8"
        activations: Format | None = "int8"
        gradients: Format | None = "int8"
        tile_size: int | None = setting(default=None, ge=1)
        history: int | None = setting(default=None, ge=1, hide_default=True)  # microbatches; None: each by itself

        def validate(self) -> Iterable[Problem]:
            """Gradients that are quantized where activations are not, and scales of more than one kind."""
            yield from super().validate()
            if self.gradients is not None and self.activations is None:
                yield Problem(
                    path="gradients", message="needs quantized activations", fix="set activations, or gradients to null"
                )
            if self.history is not None and (self.activations is None or self.tile_size is not None):
                yield Problem(
                    path="history",
                    message="is of one scale for all activations and one for all weights",
                    got="no quantized activations" if self.activations is None else f"tile_size {self.tile_size}",
                    fix="set activations and no tile_size, or history to null",
                )

    def __init__(self, cfg: Config, *, axes: Sequence[str | None], rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, axes=axes, rngs=rngs, precision=precision)
        if cfg.history is not None:
            self.batch_dependence = "takes the largest magnitude of the batch"
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
            y = quantized(rule, contracted(x.ndim, count))(x, weight, *magnitudes)
        else:  # as one matrix, see Linear
            inner = math.prod(cfg.input_dims)
            y = quantized(rule, contracted(2, 1))(x.reshape(-1, inner), weight.reshape(inner, -1), *magnitudes)
            y = y.reshape(*x.shape[:-count], *cfg.output_dims)
        return y + expand_to(self.computed(self.bias), y.ndim) if cfg.bias else y

    def _rule(self) -> Rule:
        cfg: Any = self.cfg
        return Rule(cfg.weights, cfg.activations, cfg.gradients, cfg.tile_size)

    def _magnitudes(self, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, ...]:
        """What activations and weights are scaled by, where there is a history, which takes note of theirs."""
        if self.cfg.history is None:
            return ()
        return self._largest(self.activation_magnitudes, x), self._largest(self.weight_magnitudes, weight)

    def _largest(self, magnitudes: Magnitudes, array: jax.Array) -> jax.Array:
        """The magnitude that is scaled by: the largest of the history, before there is one that of `array` itself."""
        history = magnitudes[...]
        newest = jax.lax.stop_gradient(jnp.max(jnp.abs(array)).astype(jnp.float32))
        if not self.use_running_average:
            magnitudes[...] = jnp.concatenate([newest[None], history[:-1]])
        largest = jnp.max(history)
        return jnp.where(largest > 0, largest, newest)

    def grouped(self, x: jax.Array, product: Any) -> jax.Array:
        """See `Linear.grouped`; for rows in groups of any size a scale of an output serves the weights of all groups.

        Raises:
            RequestError: what is asked for has no quantized product of groups.
        """
        cfg: Any = self.cfg
        if cfg.history is not None:
            raise without_experts(f"the history of {cfg.history} steps", "a scale for all experts would not fit each")
        x, weight = x.astype(self.precision.compute), self.computed(self.weight)
        y = grouped_product(self._rule(), x, weight, product)
        return y + product.spread(self.computed(self.bias), y) if cfg.bias else y


def contracted(rank: int, count: int) -> Any:
    """The dimension numbers of [..., *input_dims] (of `rank`) times [*input_dims, ...]."""
    return (tuple(range(rank - count, rank)), tuple(range(count))), ((), ())
