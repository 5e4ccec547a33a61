"""The `bigram` component."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.extend import REQUIRED, Batch, Layer, Normal, Precision, node, setting


class Bigram(Layer):
    """Predicts the next token from the previous token with a table of logits."""

    @node
    class Config(Layer.Config["Bigram"]):
        """Settings for `Bigram`.

        Attributes:
            vocab_size: Number of token ids.
        """

        vocab_size: int = setting(default=REQUIRED, ge=1)

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, precision=Precision())
        self.vocab_size = cfg.vocab_size
        self.table = self.parameter(rngs, Normal(), (cfg.vocab_size, cfg.vocab_size), ("embed", "vocab"))

    def loss(self, batch: Batch) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """Return the mean cross-entropy of the targets in nats, and their weight."""
        log_probs = jax.nn.log_softmax(self.computed(self.table).astype(jnp.float32))
        losses = -log_probs[batch["tokens"], batch["targets"]]
        weights = batch["weights"] if "weights" in batch else jnp.ones_like(losses)
        weight = jnp.sum(weights)
        return jnp.sum(losses * weights) / jnp.maximum(weight, 1.0), {"weight": weight}
