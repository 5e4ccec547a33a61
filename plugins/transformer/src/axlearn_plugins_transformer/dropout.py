"""Layers with dropout, and the `dropout` feature that inserts them."""

from typing import Any, TypeVar

import attrs
import jax
from flax import nnx

from axlearn_core.config import REQUIRED, Node, interface, map, node, setting
from axlearn_core.config.slots import list_slots
from axlearn_core.config.tree import edit_nodes
from axlearn_core.errors import Problem
from axlearn_core.nn.layer import Layer, Precision
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_transformer.attention import AttentionLayer
from axlearn_plugins_transformer.cache_spec import spec_of
from axlearn_plugins_transformer.embedding import Embedding
from axlearn_plugins_transformer.feed_forward import FeedForward
from axlearn_plugins_transformer.layer_roles import SplitLayerRole
from axlearn_plugins_transformer.transformer import TransformerLayer

Tree = TypeVar("Tree", bound=Node[Any])


class DropoutTransformerLayer(TransformerLayer):
    """A transformer layer with residual dropout.

    This is the residual dropout of Vaswani et al., 2017 (section 5.4), applied before the residual sum. The parameters
    have the same paths and initial values as in `TransformerLayer`.
    """

    @node
    class Config(TransformerLayer.Config, SplitLayerRole):
        """Settings for dropout.

        Attributes:
            dropout: Share of activations to set to zero. The remaining activations are scaled by 1 / (1 - dropout).
        """

        dropout: float = setting(default=0.1, ge=0, lt=1)

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, rngs=rngs, precision=precision)
        self.attention_dropout = nnx.Dropout(cfg.dropout, rngs=rngs)
        self.feed_forward_dropout = nnx.Dropout(cfg.dropout, rngs=rngs)

    def _add_residual(self, half: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return super()._add_residual(half, x, getattr(self, f"{half}_dropout")(y))


class DropoutEmbedding(Embedding):
    """An embedding with dropout on the input of the first layer.

    A tied output layer has no dropout.
    """

    @node
    class Config(Embedding.Config):
        """Settings for dropout.

        Attributes:
            dropout: Share of activations to set to zero; see `DropoutTransformerLayer`.
        """

        dropout: float = setting(default=0.1, ge=0, lt=1)

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, rngs=rngs, precision=precision)
        self.dropout = nnx.Dropout(cfg.dropout, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Embed the tokens with dropout: int32 [B, S] -> [B, S, D]."""
        return self.dropout(super().__call__(tokens))


class DropoutOutput(Layer):
    """Wraps an attention or feed-forward layer and applies dropout to its output.

    It works in a block of any class, because the block itself does not change. The wrapped layer's parameters are under
    `base`.
    """

    @node
    class Config(Layer.Config["DropoutOutput"]):
        """Settings for dropout.

        Attributes:
            base: The wrapped layer.
            dropout: Share of activations to set to zero; see `DropoutTransformerLayer`.
        """

        input_dim: int = interface(default=REQUIRED)
        base: Node[Any] = REQUIRED
        dropout: float = setting(default=0.1, ge=0, lt=1)

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        self.base = self.child(cfg.base, rngs=rngs, input_dim=cfg.input_dim)
        self.dropout = nnx.Dropout(cfg.dropout, rngs=rngs)

    def cache_spec(self) -> Any:
        """Return the entries of the layer's cache; see `KeepsCache`."""
        return spec_of(self.base)

    def __call__(self, x: jax.Array, *args: Any) -> Any:
        """Call `base` on [B, S, D] and apply dropout to its output.

        If it returns a tuple, dropout applies to the first element.
        """
        result = self.base(x, *args)
        return (self.dropout(result[0]), *result[1:]) if isinstance(result, tuple) else self.dropout(result)


@node
class Dropout(Feature):
    """Applies dropout to attention and feed-forward outputs, and to the embeddings.

    See Vaswani et al., 2017, section 5.4. Masks depend on the layer, the microbatch, the step and the run's seed, so a
    resumed run draws the same masks. Evaluation and generation do not use dropout. Because each microbatch draws its
    own masks, the number of microbatches (accumulation, pipelines) changes the results. If a block is not a
    `transformer-layer`, the feature wraps the layers in the block's `AttentionLayer` and `FeedForward` slots. If the
    model already has dropout, the feature sets the rate.

    Attributes:
        rate: Dropout rate.
        embedding: Apply dropout to the embeddings too.
    """

    stage = "wrap"
    after = ("lora",)  # both features change the layers in `attention` and `feed_forward`
    example = "rate=0.1"

    rate: float = setting(default=0.1, ge=0, lt=1)
    embedding: bool = True

    def apply(self, cfg: Tree) -> Tree:
        """Insert dropout into every layer that supports it."""
        no_match = Problem(
            path="model",
            message="dropout finds no layer that it supports",
            expected="a transformer-layer, or a layer with a slot `Node[AttentionLayer]` or `Node[FeedForward]`",
            fix="leave the feature dropout out",
        )
        config = edit_nodes(cfg, lambda _, part: self._block(part), no_match=no_match, outermost=True)
        return map(config, self._embedding) if self.embedding else config

    def _block(self, part: Any) -> Any:
        if type(part) in (TransformerLayer.Config, DropoutTransformerLayer.Config):
            return self._replace(part, DropoutTransformerLayer.Config)
        slots = [name for half in (AttentionLayer, FeedForward) for name in list_slots(type(part), half)]
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
