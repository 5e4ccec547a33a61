"""Tests of `Functional`: abstract shapes, and initial values."""

import jax
import jax.numpy as jnp
import pytest

from axlearn_core.compose import Functional
from axlearn_core.config import Node, node
from axlearn_core.errors import ConfigError
from axlearn_core.nn.initializers import Constant, Initializer
from axlearn_core.nn.layer import Precision
from axlearn_core.nn.linear import Linear

SIZES = {"input_dims": (3,), "output_dims": (2,), "axes": ("embed", "mlp"), "precision": Precision()}


@node
class Fixed(Node[Initializer]):
    """An initializer that ignores the requested shape and dtype."""

    dtype: str = "float32"
    size: int = 3

    def build(self, **_):
        return lambda key, shape, dtype, **_: jnp.ones((self.size, 2), self.dtype)


def test_only_values_need_the_initializer():
    functional = Functional.from_config(Linear.Config(init=Constant(value=3.0)), **SIZES)
    assert functional.abstract["weight"].shape == (3, 2)
    assert functional.init(jax.random.key(0))["weight"].tolist() == [[3.0, 3.0]] * 3


@pytest.mark.parametrize(
    ("wrong", "got"), [({"dtype": "bfloat16"}, r"bfloat16 \(3, 2\)"), ({"size": 4}, r"float32 \(4, 2\)")]
)
def test_an_initializer_of_another_array_is_refused(wrong, got):
    functional = Functional.from_config(Linear.Config(init=Fixed(**wrong)), **SIZES)
    with pytest.raises(
        ConfigError, match=rf"model \(weight\): the initializer .*\n *got: {got}\n *expected: float32 \(3, 2\)"
    ):
        functional.init(jax.random.key(0))
