"""The `gated-attention` component."""

from typing import Any

import jax
from flax import nnx

from axlearn_core.extend import Context, Linear, Node, Precision, Projection, node
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

    def __call__(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """Return the gated output, [B, S, D], and the new cache.

        Args:
            x: Input, [B, S, D].
            context: Positions and segments of the batch.
            cache: Cache of the attention, or None.
        """
        output, cache = super().__call__(x, context, cache)
        return output * jax.nn.sigmoid(self.gate(x)), cache
