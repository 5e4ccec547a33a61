"""Into a language model and out of it: token embeddings and output layers."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import REQUIRED, Node, interface, node, setting
from axlearn_core.errors import RequestError
from axlearn_core.nn.initializers import Initializer, Normal, VarianceScaling
from axlearn_core.nn.layer import Layer, Precision
from axlearn_core.nn.sharding import is_sharded


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
        init: Node[Initializer] = setting(
            default=VarianceScaling(mode="fan_out", distribution="normal"), kind="training"
        )

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        self.weight = self.parameter(rngs, cfg.init, (cfg.vocab_size, cfg.dim), ("vocab", "embed"))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32 [B, S] -> [B, S, D]."""
        table = self.computed(self.weight)
        if tokens.size == 1 and is_sharded():
            # XLA for GPUs reads one row by a slice, for which it would gather a whole table that devices share.
            x = table[jnp.broadcast_to(tokens.reshape(1), (2,))][:1].reshape(*tokens.shape, -1)
        else:
            x = table[tokens]
        return x * self.cfg.dim**0.5 if self.cfg.scale else x

    def head_weight(self) -> jax.Array:
        """[D, V]: the table transposed."""
        return self.weight[...].T


class PositionEmbedding(Protocol):
    """Turns positions into vectors that are added to those of the tokens. Built with `dim`, `rngs`, `precision`."""

    def __call__(self, positions: jax.Array) -> jax.Array:
        """int32 [B or 1, S] -> [B or 1, S, D]."""
        ...


class LearnedPositions(Layer):
    """A table of vectors by position (Gehring et al., 2017; GPT-2)."""

    @node
    class Config(Layer.Config["LearnedPositions"]):
        """`max_length` is how many positions there are; a position beyond them becomes NaN."""

        dim: int = interface(default=REQUIRED)
        max_length: int = setting(default=1024, ge=1)
        init: Node[Initializer] = setting(default=Normal(stddev=0.02), kind="training")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        self.weight = self.parameter(rngs, cfg.init, (cfg.max_length, cfg.dim), ("vocab", "embed"))

    def __call__(self, positions: jax.Array) -> jax.Array:
        """int32 [B or 1, S] -> [B or 1, S, D]; raises `RequestError` where S is more than there are."""
        if positions.shape[1] > self.cfg.max_length:
            raise RequestError(
                f"learned-positions: {positions.shape[1]} positions, and there are {self.cfg.max_length}\n"
                "    fix: set input.sequence_length to at most that, or max_length higher"
            )
        return self.computed(self.weight).at[positions].get(mode="fill", fill_value=jnp.nan)


class Head(Layer):
    """The weights of an output head that is not tied to the embedding; the loss multiplies by them."""

    @node
    class Config(Layer.Config["Head"]):
        """`init` is scaled by the width."""

        vocab_size: int = interface(default=REQUIRED)
        dim: int = interface(default=REQUIRED)
        init: Node[Initializer] = setting(default=VarianceScaling(), kind="training")

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
