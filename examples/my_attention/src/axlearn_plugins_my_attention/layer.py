"""The component `gated-attention`."""

from typing import Any

import jax
from flax import nnx

from axlearn_core.extend import Context, Linear, Node, Precision, Projection, node
from axlearn_plugins_transformer.attention import Attention


class GatedAttention(Attention):
    """`attention(x) * sigmoid(gate(x))`, a gate per channel (Qiu et al., 2025, arXiv 2505.06708, position G5)."""

    @node
    class Config(Attention.Config):
        """`gate` is the linear map of the gate, from the input of the attention."""

        gate: Node[Projection] = Linear.Config()

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, rngs=rngs, precision=precision)
        width = (cfg.input_dim,)
        self.gate = self.child(cfg.gate, rngs=rngs, input_dims=width, output_dims=width, axes=("embed", "mlp"))

    def __call__(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """[B, S, D] and its cache -> ([B, S, D], the new cache)."""
        output, cache = super().__call__(x, context, cache)
        return output * jax.nn.sigmoid(self.gate(x)), cache
