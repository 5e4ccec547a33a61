"""A linear map from the hidden states of a language model to one number, such as a reward or a value."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import Node
from axlearn_core.nn.layer import Precision, shapes_only
from axlearn_core.nn.linear import Linear


class ScalarHead(Linear):
    """Maps hidden states [..., D] to float32 [...]. Its parameters and its computation are float32.

    Args:
        model: Config of the language model, which determines D.
        rngs: Random streams, as offered to an objective.
        bias: Whether to add a bias, which starts at zero.
    """

    def __init__(self, model: Node[Any], *, rngs: nnx.Rngs, bias: bool = False):
        cfg = Linear.Config(input_dims=(hidden_width(model),), output_dims=(1,), bias=bias)
        super().__init__(cfg, axes=("embed", None), rngs=rngs, precision=Precision())

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [..., D] to float32 [...]."""
        return jnp.squeeze(super().__call__(x), axis=-1)


def hidden_width(model: Node[Any]) -> int:
    """Return the width D of a language model's hidden states."""

    def head_weight() -> jax.Array:
        with shapes_only():
            return model.build(rngs=nnx.Rngs(0)).decoder.head_weight()

    return jax.eval_shape(head_weight).shape[0]
