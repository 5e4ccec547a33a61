"""Position-wise feed-forward layers."""

from typing import Protocol

import jax
from flax import nnx

from axlearn_core.config import REQUIRED, Node, Scaled, interface, node, setting, size_of
from axlearn_core.nn.layer import Layer, Precision
from axlearn_core.nn.linear import Linear, Projection
from axlearn_core.nn.remat import tag
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_transformer.kernels.gated_linear_unit import (
    Activation,
    ActivationFunction,
    GatedForm,
    GatedLinearUnitOp,
    activation_function,
)


class FeedForward(Protocol):
    """Maps each position independently.

    It is built with `input_dim`, `rngs` and `precision`.
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the layer: [B, S, D] -> [B, S, D]."""
        ...


class GatedFeedForward(Layer):
    """`down(activation(gate(x)) * up(x))`.

    With the default activation, this is SwiGLU (Shazeer, 2020). A `form` combines the gate and up projections in another way.
    """

    @node
    class Config(Layer.Config["GatedFeedForward"]):
        """Settings for the layer.

        Attributes:
            hidden_dim: Hidden size; it may be relative to the width. The default is Llama's: 8/3 of the width, rounded
                up to a multiple of 128.
            activation: Activation function: a name, or a node such as `{type: swish, beta: 1.702}`.
            form: How to combine the gate and up projections, such as `{type: clamped-form}`. None is
                `activation(gate) * up`.
            kernel: Implementation of the `gated_linear_unit` op. None selects the best one.
            gate: Gate projection.
            up: Up projection.
            down: Down projection.
        """

        input_dim: int = interface(default=REQUIRED)
        hidden_dim: int | Node[int] = Scaled(factor=8 / 3, multiple_of=128)
        activation: Activation | Node[ActivationFunction] = "silu"
        form: Node[GatedForm] | None = setting(default=None, hide_default=True)
        kernel: str | None = setting(default=None, kind="execution")
        gate: Node[Projection] = Linear.Config()
        up: Node[Projection] = Linear.Config()
        down: Node[Projection] = Linear.Config()

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        self.hidden_dim = size_of(cfg.hidden_dim, cfg.input_dim)
        width, hidden = (cfg.input_dim,), (self.hidden_dim,)
        in_axes, out_axes = ("embed", "mlp"), ("mlp", "embed")
        self.gate = self.child(cfg.gate, rngs=rngs, input_dims=width, output_dims=hidden, axes=in_axes)
        self.up = self.child(cfg.up, rngs=rngs, input_dims=width, output_dims=hidden, axes=in_axes)
        self.down = self.child(cfg.down, rngs=rngs, input_dims=hidden, output_dims=width, axes=out_axes)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the layer: [B, S, D] -> [B, S, D]."""
        cfg = self.cfg
        unit = GatedLinearUnitOp(
            x, self.gate, self.up, hidden_dim=self.hidden_dim, activation=cfg.activation, form=cfg.form
        )
        hidden = tag(unit.run(cfg.kernel), "mlp_hidden")
        return tag(self.down(constrain(hidden, "batch", "sequence", "activation_mlp")), "mlp_out")


class PlainFeedForward(Layer):
    """`down(activation(up(x)))` (Vaswani et al., 2017). The activation may be a layer with parameters."""

    @node
    class Config(Layer.Config["PlainFeedForward"]):
        """Settings for the layer.

        Attributes:
            hidden_dim: Hidden size; it may be relative to the width. The default is four times the width.
            activation: Activation function: a name, or a node such as `{type: swish, beta: 1.702}`.
            up: Up projection.
            down: Down projection.
        """

        input_dim: int = interface(default=REQUIRED)
        hidden_dim: int | Node[int] = Scaled(factor=4.0)
        activation: Activation | Node[ActivationFunction] = "gelu"
        up: Node[Projection] = Linear.Config()
        down: Node[Projection] = Linear.Config()

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        width, hidden = (cfg.input_dim,), (size_of(cfg.hidden_dim, cfg.input_dim),)
        if isinstance(cfg.activation, Layer.Config):
            self.activation = self.child(cfg.activation, rngs=rngs)
        self.up = self.child(cfg.up, rngs=rngs, input_dims=width, output_dims=hidden, axes=("embed", "mlp"))
        self.down = self.child(cfg.down, rngs=rngs, input_dims=hidden, output_dims=width, axes=("mlp", "embed"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the layer: [B, S, D] -> [B, S, D]."""
        cfg = self.cfg
        learned = isinstance(cfg.activation, Layer.Config)
        activation = self.activation if learned else activation_function(cfg.activation)
        hidden = tag(activation(tag(self.up(x), "mlp_up")), "mlp_hidden")
        return tag(self.down(constrain(hidden, "batch", "sequence", "activation_mlp")), "mlp_out")
