"""The `gated-attention` component."""

import jax
from flax import nnx

from axlearn_core.extend import Linear, Node, Precision, Projection, node
from axlearn_plugins_transformer.attention import Attention


class GatedAttention(Attention):
    """Computes `attention(x) * sigmoid(gate(x))`, with one gate per channel.

    Source: Qiu et al., 2025, arXiv 2505.06708, position G5.
    """

    @node
    class Config(Attention.Config):
        """Settings for `GatedAttention`.

        Attributes:
            gate: Linear map from the input of the attention to the gate.
        """

        gate: Node[Projection] = Linear.Config()

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, rngs=rngs, precision=precision)
        width = (cfg.input_dim,)
        self.gate = self.child(cfg.gate, rngs=rngs, input_dims=width, output_dims=width, axes=("embed", "mlp"))

    def finish(self, context_vectors: jax.Array, x: jax.Array) -> jax.Array:
        """Return the gated output, [B, S, D]."""
        return super().finish(context_vectors, x) * jax.nn.sigmoid(self.gate(x))
