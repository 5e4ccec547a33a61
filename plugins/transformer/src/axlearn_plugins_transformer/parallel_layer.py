"""The `parallel-transformer-layer` component."""

from typing import Any

import jax
from flax import nnx

from axlearn_core.config import REQUIRED, Node, interface, node, setting
from axlearn_core.nn.layer import Context, Layer, Precision
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_transformer.attention import Attention, AttentionLayer
from axlearn_plugins_transformer.cache_spec import spec_of
from axlearn_plugins_transformer.feed_forward import FeedForward, GatedFeedForward
from axlearn_plugins_transformer.norm import LayerNorm, Norm
from axlearn_plugins_transformer.transformer import RESIDUAL


class ParallelTransformerLayer(Layer):
    """`x + attention(norm(x)) + feed_forward(norm(x))`: both halves have the same input.

    Source: Wang & Komatsuzaki, 2021 (GPT-J); used by GPT-NeoX, Phi-2 and Cohere.
    """

    @node
    class Config(Layer.Config["ParallelTransformerLayer"]):
        """Settings for the layer.

        Attributes:
            attention: Attention layer.
            feed_forward: Feed-forward layer.
            norm: Norm of the input.
            shared_norm: Use one norm for both halves. Otherwise, each half has its own (GPT-NeoX).
            residual_multiplier: Factor applied to the output of each half before the residual sum.
        """

        input_dim: int = interface(default=REQUIRED)
        attention: Node[AttentionLayer] = Attention.Config()
        feed_forward: Node[FeedForward] = GatedFeedForward.Config()
        norm: Node[Norm] = LayerNorm.Config()
        shared_norm: bool = True
        residual_multiplier: float = setting(default=1.0, gt=0, hide_default=True)

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        self.attention = self.child(cfg.attention, rngs=rngs, input_dim=cfg.input_dim)
        self.feed_forward = self.child(cfg.feed_forward, rngs=rngs, input_dim=cfg.input_dim)
        self.attention_norm = self.child(cfg.norm, rngs=rngs, dim=cfg.input_dim)
        if not cfg.shared_norm:
            self.feed_forward_norm = self.child(cfg.norm, rngs=rngs, dim=cfg.input_dim)

    def cache_spec(self) -> Any:
        """Return the entries of the cache; see `KeepsCache`."""
        return spec_of(self.attention)

    def __call__(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Apply the layer: [B, S, D] and its cache -> ([B, S, D], new cache)."""
        normalized = self.attention_norm(x)
        y, cache = self.attention(normalized, context, cache)
        y = y + self.feed_forward(normalized if self.cfg.shared_norm else self.feed_forward_norm(x))
        y, scale = constrain(y, *RESIDUAL), self.cfg.residual_multiplier
        return x + (y if scale == 1 else y * scale), cache
