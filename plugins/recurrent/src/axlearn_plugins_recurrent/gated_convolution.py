"""Gated short convolutions (LFM2; Liquid AI, 2025, arXiv 2511.23404).

Legend: B sequences, S tokens, D width, F channels.
"""

from typing import Any

import jax
from flax import nnx

from axlearn_core.config import REQUIRED, Node, Scaled, interface, node, setting, size_of
from axlearn_core.nn.layer import Context, Layer, Precision
from axlearn_core.nn.linear import Linear, Projection
from axlearn_core.nn.remat import tag
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_recurrent.convolution import ShortConvolution, TokenConvolution
from axlearn_plugins_recurrent.linear_attention_layer import part_of
from axlearn_plugins_transformer.cache_spec import CacheEntry
from axlearn_plugins_transformer.layer_roles import RecurrentRole
from axlearn_plugins_transformer.recurrence import Sequences, run_recurrent


class GatedConvolution(Layer):
    """`output(gate(x) * convolution(input_gate(x) * value(x)))`: a short convolution between two gates.

    Its state consists of the latest inputs of the convolution. The gates have no activation.
    """

    @node
    class Config(Layer.Config["GatedConvolution"], RecurrentRole):
        """Settings for the sizes and the parts.

        Attributes:
            hidden_dim: Number of channels; it may be relative to the width. The default is the width.
            convolution: Convolution of the channels.
            value: Projection to the channels (x in the paper).
            input_gate: Projection to the factors of the values (B in the paper).
            gate: Projection to the factors of the results (C in the paper).
            output: Output projection.
        """

        input_dim: int = interface(default=REQUIRED)
        hidden_dim: int | Node[int] = setting(default=Scaled(factor=1.0), ge=1)
        convolution: Node[TokenConvolution] = ShortConvolution.Config(width=3, activation=None)
        value: Node[Projection] = Linear.Config()
        input_gate: Node[Projection] = Linear.Config()
        gate: Node[Projection] = Linear.Config()
        output: Node[Projection] = Linear.Config()

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        width, hidden = (cfg.input_dim,), (size_of(cfg.hidden_dim, cfg.input_dim),)
        inputs = {"input_dims": width, "output_dims": hidden, "axes": ("embed", "mlp")}
        self.value = self.child(cfg.value, rngs=rngs, **inputs)
        self.input_gate = self.child(cfg.input_gate, rngs=rngs, **inputs)
        self.gate = self.child(cfg.gate, rngs=rngs, **inputs)
        self.convolution = self.child(cfg.convolution, rngs=rngs, channels=hidden, axes=("mlp",))
        outputs = {"input_dims": hidden, "output_dims": width, "axes": ("mlp", "embed")}
        self.output = self.child(cfg.output, rngs=rngs, **outputs)

    def cache_spec(self) -> dict[str, CacheEntry]:
        """Return the entry of the latest inputs of the convolution; see `KeepsCache`."""
        return {"convolution": self.convolution.cache_spec()}

    def __call__(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Apply the layer: [B, S, D] and its state -> ([B, S, D], new state)."""
        return run_recurrent(self.mix, x, context, cache)

    def mix(self, x: jax.Array, sequences: Sequences, state: Any) -> tuple[jax.Array, Any]:
        """Process the tokens of sequences; see `Recurrence`."""
        channels = ("batch", "sequence", "activation_mlp")
        value = constrain(tag(self.value(x), "value") * self.input_gate(x), *channels)
        part = None if state is None else state["convolution"]
        y, latest = self.convolution(value, part_of(sequences, "convolution"), part)
        y = tag(constrain(y * self.gate(x), *channels), "context")
        return tag(self.output(y), "attention_out"), {"convolution": latest}
