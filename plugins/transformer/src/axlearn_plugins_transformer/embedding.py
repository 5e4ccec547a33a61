"""Into a language model and out of it: token embeddings and output layers."""

from typing import Any, Protocol

import jax
from flax import nnx

from axlearn_core.config import REQUIRED, Node, interface, node
from axlearn_core.nn.initializers import Initializer, VarianceScaling
from axlearn_core.nn.layer import Layer, Precision


class TokenEmbedding(Protocol):
    """Turns token ids into vectors. Built with `vocab_size`, `dim`, `rngs`, `precision`."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32 [B, S] -> [B, S, D]."""
        ...

    def head_weight(self) -> jax.Array:
        """[D, V], for a decoder without a head of its own."""
        ...


class Embedding(Layer):
    """A table of vectors by token id."""

    @node
    class Config(Layer.Config["Embedding"]):
        """`scale` multiplies by sqrt(dim) (Vaswani et al., 2017). The default initialiser has the variance 1/dim."""

        vocab_size: int = interface(default=REQUIRED)
        dim: int = interface(default=REQUIRED)
        scale: bool = False
        init: Node[Initializer] = VarianceScaling(mode="fan_out", distribution="normal")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        self.weight = self.parameter(rngs, cfg.init, (cfg.vocab_size, cfg.dim), ("vocab", "embed"))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32 [B, S] -> [B, S, D]."""
        x = self.computed(self.weight)[tokens]
        return x * self.cfg.dim**0.5 if self.cfg.scale else x

    def head_weight(self) -> jax.Array:
        """[D, V]: the table transposed."""
        return self.weight[...].T


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
