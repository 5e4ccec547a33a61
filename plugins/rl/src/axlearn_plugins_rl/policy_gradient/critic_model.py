"""A critic that is a second model."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from axlearn_core.compose import Program, TrainedModel
from axlearn_core.config import Configurable, Node, find, node
from axlearn_core.contracts.capabilities import vocabulary_size
from axlearn_core.contracts.experiment import get_objective_config
from axlearn_core.contracts.parts import Model, Tokenizer
from axlearn_core.errors import ConfigError, Problem, RequestError
from axlearn_plugins_finetune.lora.start import check_same_tokenizer
from axlearn_plugins_finetune.objectives.scalar_head import ScalarHead
from axlearn_plugins_finetune.objectives.sequences import check_language_model
from axlearn_plugins_rl.policy_gradient.drawn_tokens import select_model_inputs


class CriticModel(Configurable, TrainedModel):
    """A second language model whose hidden states are mapped to values.

    Its gradients do not reach the policy, and it needs the memory of another trained model. If `weights` is a run of a reward
    model, the map starts from the one of the rewards.
    """

    @node
    class Config(Configurable.Config["CriticModel"]):
        """The model.

        Attributes:
            model: Config of the critic. None uses the config of the policy.
            weights: Path or URI of the initial weights of the critic. None uses the weights that training starts from.
        """

        model: Node[Model] | None = None
        weights: str | None = None

    def __init__(self, cfg: Config, *, model: Node[Any], rngs: nnx.Rngs):
        critic, path = cfg.model or model, "objective.critic.values.model"
        check_language_model(critic, path)
        sizes = [vocabulary_size(config) for config in (critic, model)]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                Problem(
                    path=f"{path}.vocab_size",
                    message="the critic and the policy have different vocabularies",
                    got=str(sizes[0]),
                    expected=f"{sizes[1]}, which is model.vocab_size",
                    fix="use a critic with the tokenizer and the vocab_size of the policy",
                )
            )
        super().__init__(critic, rngs=rngs, weights=cfg.weights)
        self.head = ScalarHead(critic, rngs=rngs, bias=True)

    def predict(self, hidden: jax.Array, inputs: Mapping[str, Any]) -> jax.Array:
        """See `policy_terms.ValueModel`. The hidden states of the policy are not used."""
        states, _ = self.model.hidden_states(select_model_inputs(inputs))
        return self.head(states)


def check_critic(program: Program, tokenizer: Tokenizer, *, is_new: bool) -> None:
    """Check the critic of a run.

    Args:
        program: Program of the run.
        tokenizer: Tokenizer of the policy.
        is_new: Whether the run has not started yet, so that it will read the weights of its critic.

    Raises:
        RequestError: The critic was trained with another tokenizer, or the learner freezes all its parameters.
    """
    objective = get_objective_config(program.config)
    for critic in find(objective, CriticModel.Config).values() if is_new and objective is not None else ():
        if isinstance(critic, CriticModel.Config) and critic.weights is not None:
            check_same_tokenizer(
                critic.weights, tokenizer, fix="use a critic that was trained with the tokenizer of the policy"
            )
    paths = [p for p in program.trained.abstract if p.startswith("objective.critic.")]
    if paths and set(program.function("train").frozen).issuperset(paths):
        raise RequestError(
            "the critic is not trained, because a rule of the learner freezes all its parameters\n"
            f"    got: {len(paths)} frozen arrays, such as {paths[0]}\n"
            "    fix: remove the rule or the feature that freezes them, or use a method without a critic"
        )
