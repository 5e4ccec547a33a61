"""The output layer of a language model."""

from typing import Any, Protocol

import jax
from flax import nnx

from axlearn_core.config import REQUIRED, Node, interface, node
from axlearn_core.nn.initializers import Initializer, VarianceScaling
from axlearn_core.nn.layer import Layer, Precision


class Head(Layer):
    """The weights of an output head that is not tied to the embedding; the loss multiplies by them."""

    @node
    class Config(Layer.Config["Head"]):
        """`init` is scaled by the width."""

        vocab_size: int = interface(default=REQUIRED)
        dim: int = interface(default=REQUIRED)
        init: Node[Initializer] = VarianceScaling()

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        self.weight = self.parameter(rngs, cfg.init, (cfg.dim, cfg.vocab_size), ("embed", "vocab"))

    def head_weight(self) -> jax.Array:
        """[D, V]."""
        return self.weight[...]


class OutputHead(Protocol):
    """Gives the weights of the output layer. Built with `vocab_size`, `dim`, `rngs`, `precision`."""

    def head_weight(self) -> Any:
        """[D, V], in the dtype of the parameters."""
        ...
