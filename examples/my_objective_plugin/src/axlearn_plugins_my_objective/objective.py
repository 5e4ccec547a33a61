"""The `confidence-penalty` component."""

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.extend import Configurable, ModelLoss, Node, Objective, node, setting


class ConfidencePenalty(Configurable, nnx.Module):
    """Computes `base - weight * entropy of the predictions`.

    Source: Pereyra et al., 2017, arXiv 1701.06548.
    """

    @node
    class Config(Configurable.Config["ConfidencePenalty"]):
        """Settings for `ConfidencePenalty`.

        Attributes:
            weight: Factor of the entropy.
            base: Objective that the penalty is added to.
        """

        weight: float = setting(default=0.1, ge=0)
        base: Node[Objective] = ModelLoss.Config()

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, model: Node):
        self.weight, self.base = cfg.weight, cfg.base.build(rngs=rngs, model=model)

    def loss(self, model, batch, key):
        """Return the loss and its summaries. See `axlearn_core.contracts.parts.Objective`."""
        loss, summaries = self.base.loss(model, batch, key)
        logs = jax.nn.log_softmax(model(batch["tokens"], batch.get("positions"), batch.get("segment_ids")))
        entropies = -jnp.sum(jnp.exp(logs) * logs, axis=-1)
        entropy = jnp.sum(entropies * batch["weights"]) / jnp.maximum(jnp.sum(batch["weights"]), 1.0)
        return loss - self.weight * entropy, {**summaries, "entropy": entropy}
