"""Token embeddings, position embeddings and output heads of a language model."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import REQUIRED, Node, factor_of, interface, node, setting
from axlearn_core.errors import RequestError
from axlearn_core.nn.initializers import Initializer, Normal, VarianceScaling
from axlearn_core.nn.layer import Layer, Precision
from axlearn_core.nn.sharding import is_sharded


class TokenEmbedding(Protocol):
    """Maps token ids to vectors.

    It is built with `vocab_size`, `dim`, `rngs` and `precision`.
    """

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Embed the tokens: int32 [B, S] -> [B, S, D]."""
        ...

    def head_weight(self) -> jax.Array:
        """Return the output weight [D, V], for a decoder without a separate head."""
        ...


class Embedding(Layer):
    """A table with one vector per token id."""

    @node
    class Config(Layer.Config["Embedding"]):
        """Settings for the embedding.

        Attributes:
            scale: Multiply the vectors by sqrt(dim) (Vaswani et al., 2017).
            multiplier: Factor applied to the vectors (the embedding multiplier of Granite): a number, or a node that builds one
                from the width.
            init: Initializer of the table. The default has variance 1/dim.
        """

        vocab_size: int = interface(default=REQUIRED)
        dim: int = interface(default=REQUIRED)
        scale: bool = False
        multiplier: float | Node[float] = setting(default=1.0, gt=0, hide_default=True)
        init: Node[Initializer] = setting(
            default=VarianceScaling(mode="fan_out", distribution="normal"), kind="training"
        )

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        self.weight = self.parameter(rngs, cfg.init, (cfg.vocab_size, cfg.dim), ("vocab", "embed"))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Embed the tokens: int32 [B, S] -> [B, S, D]."""
        table = self.computed(self.weight)
        if tokens.size == 1 and is_sharded():
            # For a single-row lookup, XLA on GPUs would emit a slice, which gathers the whole sharded table. Look up two rows.
            x = table[jnp.broadcast_to(tokens.reshape(1), (2,))][:1].reshape(*tokens.shape, -1)
        else:
            x = table[tokens]
        factor = factor_of(self.cfg.multiplier, width=self.cfg.dim)
        multiplier = factor * (self.cfg.dim**0.5 if self.cfg.scale else 1.0)
        return x if multiplier == 1 else x * multiplier

    def head_weight(self) -> jax.Array:
        """Return the transposed table, [D, V]."""
        return self.weight[...].T


class PositionEmbedding(Protocol):
    """Maps positions to vectors that are added to the token vectors.

    It is built with `dim`, `rngs` and `precision`.
    """

    def __call__(self, positions: jax.Array) -> jax.Array:
        """Embed the positions: int32 [B or 1, S] -> [B or 1, S, D]."""
        ...


class LearnedPositions(Layer):
    """A table with one vector per position (Gehring et al., 2017; GPT-2)."""

    @node
    class Config(Layer.Config["LearnedPositions"]):
        """Settings for the table.

        Attributes:
            max_length: Number of positions. Later positions map to NaN.
            init: Initializer of the table.
        """

        dim: int = interface(default=REQUIRED)
        max_length: int = setting(default=1024, ge=1)
        init: Node[Initializer] = setting(default=Normal(stddev=0.02), kind="training")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        self.weight = self.parameter(rngs, cfg.init, (cfg.max_length, cfg.dim), ("vocab", "embed"))

    def __call__(self, positions: jax.Array) -> jax.Array:
        """Embed the positions: int32 [B or 1, S] -> [B or 1, S, D].

        Raise RequestError if S exceeds `max_length`.
        """
        if positions.shape[1] > self.cfg.max_length:
            raise RequestError(
                f"learned-positions: the input has {positions.shape[1]} positions, but max_length is {self.cfg.max_length}\n"
                "    fix: lower input.sequence_length, or raise max_length"
            )
        return self.computed(self.weight).at[positions].get(mode="fill", fill_value=jnp.nan)


class Head(Layer):
    """The weight of an output head that is not tied to the embedding.

    The loss multiplies the hidden states by it.
    """

    @node
    class Config(Layer.Config["Head"]):
        """Settings for the head.

        Attributes:
            init: Initializer of the weight, scaled by the width.
        """

        vocab_size: int = interface(default=REQUIRED)
        dim: int = interface(default=REQUIRED)
        init: Node[Initializer] = setting(default=VarianceScaling(), kind="training")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        self.weight = self.parameter(rngs, cfg.init, (cfg.dim, cfg.vocab_size), ("embed", "vocab"))

    def head_weight(self) -> jax.Array:
        """Return the output weight, [D, V]."""
        return self.weight[...]


class OutputHead(Protocol):
    """Contains the weight of the output layer.

    It is built with `vocab_size`, `dim`, `rngs` and `precision`.
    """

    def head_weight(self) -> Any:
        """Return the output weight, [D, V], in the dtype of the parameters."""
        ...
