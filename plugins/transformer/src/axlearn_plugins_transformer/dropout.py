"""Dropout in a transformer: the layers that draw, and the feature `dropout` that puts them in place."""

from typing import Any, TypeVar

import attrs
import jax
from flax import nnx

from axlearn_core.config import REQUIRED, Node, interface, map, node, setting
from axlearn_core.config.slots import slots_of
from axlearn_core.config.tree import edit_nodes
from axlearn_core.errors import Problem
from axlearn_core.nn.layer import Layer, Precision
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_transformer.attention import AttentionLayer
from axlearn_plugins_transformer.embedding import Embedding
from axlearn_plugins_transformer.feed_forward import FeedForward
from axlearn_plugins_transformer.layer_roles import TwoHalvesRole
from axlearn_plugins_transformer.transformer import TransformerLayer

Tree = TypeVar("Tree", bound=Node[Any])


class DropoutTransformerLayer(TransformerLayer):
    """A transformer layer that drops out the output of its attention and of its feed-forward half.

    The residual dropout of Vaswani et al., 2017 (section 5.4), before the residual sum. Parameters are those of
    `TransformerLayer`, with the same paths and the same initial values.
    """

    @node
    class Config(TransformerLayer.Config, TwoHalvesRole):
        """`dropout`: the share of activations that are set to zero; the rest is scaled up by 1 / (1 - dropout)."""

        dropout: float = setting(default=0.1, ge=0, lt=1)

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, rngs=rngs, precision=precision)
        self.attention_dropout = nnx.Dropout(cfg.dropout, rngs=rngs)
        self.feed_forward_dropout = nnx.Dropout(cfg.dropout, rngs=rngs)

    def _after(self, half: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return super()._after(half, x, getattr(self, f"{half}_dropout")(y))


class DropoutEmbedding(Embedding):
    """An embedding that drops out the vectors that go into the first layer; its transpose as an output layer is whole."""

    @node
    class Config(Embedding.Config):
        """`dropout`: as in `DropoutTransformerLayer`."""

        dropout: float = setting(default=0.1, ge=0, lt=1)

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, rngs=rngs, precision=precision)
        self.dropout = nnx.Dropout(cfg.dropout, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32 [B, S] -> [B, S, D]."""
        return self.dropout(super().__call__(tokens))


class DropoutOutput(Layer):
    """Any layer that stands in a block as its attention or its feed-forward half, its output dropped out.

    For blocks of any class: the block itself is not changed. Parameters are below `base`.
    """

    @node
    class Config(Layer.Config["DropoutOutput"]):
        """`dropout`: as in `DropoutTransformerLayer`."""

        input_dim: int = interface(default=REQUIRED)
        base: Node[Any] = REQUIRED
        dropout: float = setting(default=0.1, ge=0, lt=1)

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        self.base = self.child(cfg.base, rngs=rngs, input_dim=cfg.input_dim)
        self.dropout = nnx.Dropout(cfg.dropout, rngs=rngs)

    def init_cache(self, batch: int, length: int) -> Any:
        """See `AttentionLayer`."""
        return self.base.init_cache(batch, length)

    def __call__(self, x: jax.Array, *args: Any) -> Any:
        """[B, S, D] -> what `base` gives, with the first [B, S, D] of it dropped out."""
        result = self.base(x, *args)
        return (self.dropout(result[0]), *result[1:]) if isinstance(result, tuple) else self.dropout(result)


@node
class Dropout(Feature):
    """Drops out the output of each attention and feed-forward layer, and the embeddings (Vaswani et al., 2017, section 5.4).

    Masks differ by place, layer, microbatch and step, and are derived from the run's seed: a resumed run draws what it would
    have drawn. Evaluation and generation drop nothing. With it the number of microbatches (accumulation, pipelines) changes
    the mathematics, since each microbatch draws masks of its own. `embedding=false` leaves the embeddings alone. A block of
    another class than `transformer-layer` keeps its class: what stands in its slots for an `AttentionLayer` and a
    `FeedForward` is wrapped. Where there is dropout already, the rate is set anew.
    """

    stage = "wrap"
    after = ("lora",)  # both change what stands in `attention` and `feed_forward`
    example = "rate=0.1"

    rate: float = setting(default=0.1, ge=0, lt=1)
    embedding: bool = True

    def apply(self, cfg: Tree) -> Tree:
        """Puts the layers that draw in the place of those that do not."""
        nothing = Problem(
            path="model",
            message="dropout finds no layer to drop out",
            expected="a transformer-layer, or a layer with a slot `Node[AttentionLayer]` or `Node[FeedForward]`",
            fix="leave the feature dropout out",
        )
        config = edit_nodes(cfg, lambda _, part: self._block(part), nothing=nothing, outermost=True)
        return map(config, self._embedding) if self.embedding else config

    def _block(self, part: Any) -> Any:
        if type(part) in (TransformerLayer.Config, DropoutTransformerLayer.Config):
            return self._replace(part, DropoutTransformerLayer.Config)
        slots = [name for half in (AttentionLayer, FeedForward) for name in slots_of(type(part), half)]
        halves = {name: half for name in slots if isinstance(half := getattr(part, name), Node)}
        return attrs.evolve(part, **{name: self._wrap(half) for name, half in halves.items()}) if halves else None

    def _embedding(self, part: Any) -> Any:
        draws = type(part) in (Embedding.Config, DropoutEmbedding.Config)
        return self._replace(part, DropoutEmbedding.Config) if draws else part

    def _replace(self, part: Any, target: Any) -> Any:
        fields = {a.name: getattr(part, a.name) for a in attrs.fields(type(part)) if a.init}
        return target(**{**fields, "dropout": self.rate})

    def _wrap(self, part: Node[Any]) -> DropoutOutput.Config:
        base = part.base if isinstance(part, DropoutOutput.Config) else part
        return DropoutOutput.Config(base=base, dropout=self.rate)
