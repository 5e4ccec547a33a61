"""The `gpt-oss-attention` component."""

import attrs
import jax
from flax import nnx

from axlearn_core.extend import Constant, Context, Precision, node
from axlearn_plugins_transformer.attention import Attention
from axlearn_plugins_transformer.kernels.attention import AttentionOp


class SinkAttention(Attention):
    """Attention with a trained sink for each query head: an extra logit in the softmax, which has no value.

    Source: OpenAI, 2025, arXiv 2508.10925, section 2.2.
    """

    @node
    class Config(Attention.Config):
        """The settings of `Attention`."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, rngs=rngs, precision=precision)
        self.sinks = self.parameter(rngs, Constant(value=0.0), (cfg.num_heads,), ("heads",))

    def scores(self, query: jax.Array, key: jax.Array, value: jax.Array, context: Context) -> AttentionOp:
        """Return the op with sinks; see `Attention.scores`."""
        return attrs.evolve(super().scores(query, key, value, context), sinks=self.computed(self.sinks))
