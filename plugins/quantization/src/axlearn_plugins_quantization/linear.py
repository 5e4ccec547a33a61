"""A linear map that is trained with quantized products."""

import math
from collections.abc import Iterable
from typing import Any

import jax

from axlearn_core.config import node, setting
from axlearn_core.errors import Problem
from axlearn_core.nn.layer import expand_to
from axlearn_core.nn.linear import Linear
from axlearn_core.nn.sharding import is_sharded
from axlearn_plugins_quantization.library import Format, Rule, grouped_product, product


class QuantizedLinear(Linear):
    """`x @ weight + bias`, where the product is one of quantized numbers.

    The parameters are those of `Linear`, in their own dtype: weights and activations are quantized anew in each step, by
    their largest magnitude; each token and each output has a scale of its own. Gradients pass through the rounding.
    """

    @node
    class Config(Linear.Config):
        """The formats; see `library.Rule`."""

        weights: Format = "int8"
        activations: Format | None = "int8"
        gradients: Format | None = "int8"
        tile_size: int | None = setting(default=None, ge=1)

        def validate(self) -> Iterable[Problem]:
            """Gradients that are quantized where activations are not."""
            yield from super().validate()
            if self.gradients is not None and self.activations is None:
                yield Problem(
                    path="gradients", message="needs quantized activations", fix="set activations, or gradients to null"
                )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., *input_dims] -> [..., *output_dims]."""
        cfg: Any = self.cfg
        rule = Rule(cfg.weights, cfg.activations, cfg.gradients, cfg.tile_size)
        count = len(cfg.input_dims)
        x, weight = x.astype(self.precision.compute), self.computed(self.weight)
        if is_sharded() or cfg.tile_size is not None:
            y = product(rule, contracted(x.ndim, count))(x, weight)
        else:  # as one matrix, see Linear
            inner = math.prod(cfg.input_dims)
            y = product(rule, contracted(2, 1))(x.reshape(-1, inner), weight.reshape(inner, -1))
            y = y.reshape(*x.shape[:-count], *cfg.output_dims)
        return y + expand_to(self.computed(self.bias), y.ndim) if cfg.bias else y

    def grouped(self, x: jax.Array, product: Any) -> jax.Array:
        """See `Linear.grouped`; for rows in groups of any size a scale of an output serves the weights of all groups.

        Raises:
            RequestError: what is asked for has no quantized product of groups.
        """
        cfg: Any = self.cfg
        rule = Rule(cfg.weights, cfg.activations, cfg.gradients, cfg.tile_size)
        x, weight = x.astype(self.precision.compute), self.computed(self.weight)
        y = grouped_product(rule, x, weight, product)
        return y + product.spread(self.computed(self.bias), y) if cfg.bias else y


def contracted(rank: int, count: int) -> Any:
    """The dimension numbers of [..., *input_dims] (of `rank`) times [*input_dims, ...]."""
    return (tuple(range(rank - count, rank)), tuple(range(count))), ((), ())
