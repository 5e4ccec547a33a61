"""Training of a reward model on preferences (Bradley and Terry, 1952; Ouyang et al., 2022, arXiv 2203.02155)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import Node, node, setting
from axlearn_core.contracts.parts import Batch
from axlearn_core.nn import summaries
from axlearn_plugins_finetune.objectives.preference_objective import PreferenceObjective, Report, report_rewards
from axlearn_plugins_finetune.objectives.scalar_head import ScalarHead


class BradleyTerry(PreferenceObjective):
    """`-log sigmoid(reward of the chosen answer - reward of the rejected answer)`, averaged over pairs.

    A reward is a linear map (`objective.head`) of the model's hidden state at the last token of the answer. See `RewardScorer` for
    the use of a trained model.
    """

    @node
    class Config(PreferenceObjective.Config["BradleyTerry"]):
        """The loss.

        Attributes:
            center: Weight of the squared sum of a pair's rewards, which keeps the rewards near 0 (Eisenstein et al., 2023, arXiv
                2312.09244).
        """

        center: float = setting(default=0.0, ge=0)

    def __init__(self, cfg: Config, *, model: Node[Any], rngs: nnx.Rngs):
        super().__init__(cfg, model=model)
        self.head = ScalarHead(model, rngs=rngs)

    def score(self, model: Any, rows: Mapping[str, jax.Array]) -> jax.Array:
        """Return the rewards of the answers. See `PreferenceObjective.score`."""
        hidden, _ = model.hidden_states(rows)
        return self.head(last_hidden(hidden, rows["weights"]))

    def compare(self, scores: jax.Array, model: Any, batch: Batch) -> tuple[jax.Array, Report]:
        """Return the losses and the rewards. See `PreferenceObjective.compare`."""
        center = 0.0 if summaries.is_held_out() else self.cfg.center
        losses = center * jnp.sum(scores, axis=1) ** 2 - jax.nn.log_sigmoid(scores[:, 0] - scores[:, 1])
        return losses, report_rewards(scores)


def last_hidden(hidden: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the hidden state at the last position of each row that has a weight.

    Args:
        hidden: Hidden states, [R, S, D].
        weights: Weights of the positions, float32 [R, S].

    Returns:
        [R, D].
    """
    last = jnp.max(jnp.where(weights > 0, jnp.arange(weights.shape[1]), 0), axis=1)
    return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
