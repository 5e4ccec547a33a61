"""The `extended-transformer-layer` component."""

from collections.abc import Iterable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import Node, node, setting
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.nn.layer import Context, Precision, expand_to
from axlearn_core.nn.variables import LearnedVariable
from axlearn_plugins_transformer.feed_forward import FeedForward
from axlearn_plugins_transformer.norm import Norm
from axlearn_plugins_transformer.per_layer import PerLayerGate
from axlearn_plugins_transformer.transformer import TransformerLayer

NO_FIRST = Problem(
    path="second_feed_forward", message="requires feed_forward", fix="set feed_forward to this layer instead"
)


class OutputScale(LearnedVariable):
    """A factor of a layer's output that imported weights set. Training does not change it."""


class ExtendedTransformerLayer(TransformerLayer):
    """A transformer layer with up to three more parts, which Gemma 4 has.

    1. `second_feed_forward` reads the residual stream next to `feed_forward`. Each of the two outputs has a norm of its own, and
       `post_norm` normalizes their sum.
    2. `per_layer_gate` adds an input of the layer's own to the residual stream.
    3. `output_scale` multiplies the output of the layer.

    All positions go through the whole last layer, because a gate needs the layer's input.
    """

    @node
    class Config(TransformerLayer.Config):
        """Settings for the parts.

        Attributes:
            second_feed_forward: Feed-forward layer whose input is the residual stream without `norm`, or None. A mixture of
                experts has a norm of its own.
            branch_norm: Norm of the output of each feed-forward layer; it is built once per layer.
            per_layer_gate: Adds per-layer inputs, or None.
            output_scale: Multiply the output by a stored factor, which is 1 in new models.
        """

        second_feed_forward: Node[FeedForward] | None = None
        branch_norm: Node[Norm] | None = None
        per_layer_gate: Node[PerLayerGate] | None = None
        output_scale: bool = setting(default=False)

        def validate(self) -> Iterable[Problem]:
            """Check that `second_feed_forward` has a first one beside it, and that `branch_norm` has two branches."""
            yield from super().validate()
            if self.second_feed_forward is not None and self.feed_forward is None:
                yield NO_FIRST
            if self.branch_norm is not None and self.second_feed_forward is None:
                yield Problem(
                    path="branch_norm",
                    message="requires second_feed_forward",
                    fix="set second_feed_forward, or use post_norm",
                )

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, rngs=rngs, precision=precision)
        if cfg.second_feed_forward is not None:
            if cfg.feed_forward is None:  # an `alternate` gives this layer only the second one
                raise ConfigError(attrs.evolve(NO_FIRST, path="model.decoder.layer.second_feed_forward"))
            self.second_feed_forward = self.child(cfg.second_feed_forward, rngs=rngs, input_dim=cfg.input_dim)
        if cfg.branch_norm is not None:
            self.feed_forward_branch_norm = self.child(cfg.branch_norm, rngs=rngs, dim=cfg.input_dim)
            self.second_branch_norm = self.child(cfg.branch_norm, rngs=rngs, dim=cfg.input_dim)
        if cfg.per_layer_gate is not None:
            self.per_layer_gate = self.child(cfg.per_layer_gate, rngs=rngs, input_dim=cfg.input_dim)
        if cfg.output_scale:
            self.output_scale = OutputScale(jnp.ones(1, jnp.float32), out_sharding=(None,), eager_sharding=False)

    def __call__(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Apply the layer: [B, S, D] and its cache -> ([B, S, D], new cache)."""
        x, cache = self.attention_half(x, context, cache)
        x = self.feed_forward_half(x)
        if self.cfg.per_layer_gate is not None:
            x = x + self.per_layer_gate(x, context.layer_inputs)
        if self.cfg.output_scale:
            x = x * expand_to(self.output_scale[...].astype(x.dtype), x.ndim)
        return x, cache

    def feed_forward_half(self, x: jax.Array) -> jax.Array:
        """Apply both feed-forward layers and their residual sum."""
        if self.cfg.second_feed_forward is None:
            return super().feed_forward_half(x)
        y, second = self.feed_forward(self._pre_norm("feed_forward", x)), self.second_feed_forward(x)
        if self.cfg.branch_norm is not None:
            y, second = self.feed_forward_branch_norm(y), self.second_branch_norm(second)
        return self._add_residual("feed_forward", x, y + second)
