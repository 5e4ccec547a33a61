"""The `qwen3-next-attention` component."""

import jax
from flax import nnx

from axlearn_core.extend import Linear, Node, Precision, Projection, constrain, node
from axlearn_plugins_transformer.attention import Attention


class HeadGatedAttention(Attention):
    """Attention with an output gate: `output(context * sigmoid(gate(x)))`, with one gate for each element of a head.

    Source: Qiu et al., 2025, arXiv 2505.06708, position G1.
    """

    @node
    class Config(Attention.Config):
        """Settings for `HeadGatedAttention`.

        Attributes:
            gate: Projection from the input of the layer to the gates.
        """

        gate: Node[Projection] = Linear.Config()

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, rngs=rngs, precision=precision)
        width, heads = (cfg.input_dim,), (cfg.num_heads, self.head_dim)
        axes = ("embed", "heads", "head_dim")
        self.gate = self.child(cfg.gate, rngs=rngs, input_dims=width, output_dims=heads, axes=axes)

    def finish(self, context_vectors: jax.Array, x: jax.Array) -> jax.Array:
        """Gate [B, S, N, V], and project it to [B, S, D]."""
        gate = constrain(self.gate(x), "batch", "sequence", "activation_heads", None)
        return super().finish(context_vectors * jax.nn.sigmoid(gate), x)
