"""The features of reinforcement learning: one for each method."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeVar

import attrs

from axlearn_core.config import Node, find, get_options, node, patch, setting
from axlearn_core.config.tree import edit_nodes
from axlearn_core.config.wrappers import edit_innermost
from axlearn_core.contracts.experiment import (
    get_chat_template_config,
    get_evaluator_configs,
    get_input_config,
    get_loop_config,
    get_model_config,
    get_parameter_rules,
    get_tracker_configs,
)
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.learn import AdamW, ParameterRule
from axlearn_core.plugins.feature import Feature, no_match_problem
from axlearn_core.train.evaluators import LossEvaluator
from axlearn_plugins_finetune.objectives.edit import open_model_config, start_from_base
from axlearn_plugins_rl.engine_policy import EnginePolicy
from axlearn_plugins_rl.policy_gradient.critic_model import CriticModel
from axlearn_plugins_rl.presets import Preset, build_preset
from axlearn_plugins_rl.reward_evaluator import RewardEvaluator
from axlearn_plugins_rl.rewards.text_rewards import ExactReward
from axlearn_plugins_rl.rl_loop import RLLoop
from axlearn_plugins_rl.rollout_buffer import RolloutBuffer
from axlearn_plugins_rl.rollout_contracts import Reward, Task
from axlearn_plugins_rl.task_input import TaskInput
from axlearn_plugins_tools.reporting.console import ConsoleTracker
from axlearn_plugins_transformer.text.language_model import LanguageModelInput

Tree = TypeVar("Tree", bound=Node[Any])
SHOWN = ("reward", "answer_length", "dead_groups", "kl", "train_rollout_difference")
"""Metrics to show on the progress line."""
CRITIC = "objective.critic"
"""Path of the critic, in the config and in the training state."""
POLICY = "policy"
"""Name of the initial weights of the policy, for `Ppo.critic`."""


@node
class PolicyGradientFeature(Feature):
    """Trains on rollouts of a task.

    `task` is the task, with its settings. `base` is a run, or other weights, to start training from. `reward` scores the answers
    (default: `exact`). Each step rolls out `batch_size` examples `group_size` times each. An answer has at most `max_tokens`
    tokens. `ahead` is the number of steps by which rollouts may run ahead. `kl` is the weight of the divergence from the initial
    weights. All other settings are under `loop` and `objective`.

    The tokenizer and the sequence length do not change. Evaluators of the loss become evaluators of the reward. If the experiment
    already has the loop, the given options are updated, and the objective, the advantages and the treatment of dead groups become
    those of the method.
    """

    stage = "replace"
    replaces = ("input", "objective", "evaluators", "loop.advantage", "loop.dead_groups")
    example = "task={type: jsonl-task, paths: problems.jsonl}"
    method: ClassVar[str] = ""
    """Name of the method in `axlearn_plugins_rl.presets`."""
    dead_groups: ClassVar[Literal["keep", "drop", "resample"]] = "keep"

    task: Node[Task] | None = None
    reward: Node[Reward] | None = None
    base: str | None = None
    batch_size: int | None = setting(default=None, ge=1)
    group_size: int | None = setting(default=None, ge=1)
    max_tokens: int | None = setting(default=None, ge=1)
    temperature: float | None = setting(default=None, gt=0)
    ahead: int | None = setting(default=None, ge=0)
    kl: float | None = setting(default=None, ge=0)

    def apply(self, cfg: Tree) -> Tree:
        """Set `input`, `objective`, `loop` and the evaluators."""
        preset = self.preset(cfg)
        loop = get_loop_config(cfg)
        if find(loop, RLLoop.Config):
            loop = edit_nodes(
                loop,
                lambda _, n: self._update(n, preset) if isinstance(n, RLLoop.Config) else None,
                no_match=no_match_problem(self.method, "an rl-loop"),
            )
        else:
            loop = edit_innermost(loop, lambda inner: self._update(self._new_loop(inner, preset), preset))
        evaluators = {
            name: RewardEvaluator.Config(every_steps=e.every_steps) if isinstance(e, LossEvaluator.Config) else e
            for name, e in get_evaluator_configs(cfg).items()
        }
        edits = {
            "input": self._input(cfg),
            "objective": preset.objective,
            "loop": loop,
            "evaluators": evaluators,
            "trackers": tuple(map(_show_rewards, get_tracker_configs(cfg))),
        }
        return start_from_base(patch(_remove_critic_rules(cfg), edits), self.base, self.method)

    def preset(self, cfg: Node[Any]) -> Preset:
        """Return the method for this experiment."""
        return build_preset(self.method, kl=self.kl)

    def _input(self, cfg: Node[Any]) -> TaskInput.Config:
        old = get_input_config(cfg)
        options = get_options(self, "task", "batch_size", "group_size")
        if isinstance(old, TaskInput.Config):
            return attrs.evolve(old, **options)
        problem = None
        if not isinstance(old, LanguageModelInput.Config):
            problem = Problem(
                path="input",
                message=f"{self.method} needs a text input with a tokenizer",
                expected="a language-model-input",
                fix=f"remove {self.method}, or set input to a task-input",
            )
        elif self.task is None:
            problem = Problem(
                path="task",
                message=f"{self.method} needs a task",
                expected="a component with its settings, such as {type: reasoning-gym, dataset: basic_arithmetic}",
                fix="`axlearn plugins list` shows the installed tasks",
            )
        if problem is not None:
            raise ConfigError(problem)
        return TaskInput.Config(
            tokenizer=old.tokenizer,
            sequence_length=old.sequence_length,
            template=get_chat_template_config(cfg),
            **options,
        )

    def _new_loop(self, inner: Node[Any], preset: Preset) -> RLLoop.Config:
        return RLLoop.Config(advantage=preset.advantage, reward=ExactReward.Config(), loop=inner)

    def _update(self, loop: RLLoop.Config, preset: Preset) -> RLLoop.Config:
        """Set the method and the given options."""
        edits: dict[str, Any] = get_options(self, "reward")
        if isinstance(loop.policy, EnginePolicy.Config):
            edits["policy"] = attrs.evolve(loop.policy, **get_options(self, "max_tokens", "temperature"))
        if isinstance(loop.buffer, RolloutBuffer.Config):
            edits["buffer"] = attrs.evolve(loop.buffer, **get_options(self, "ahead"))
        return attrs.evolve(loop, advantage=preset.advantage, dead_groups=self.dead_groups, **edits)


def _show_rewards(tracker: Node[Any]) -> Node[Any]:
    """Let a `console` tracker show rewards, unless it shows other values already."""
    if isinstance(tracker, ConsoleTracker.Config) and not tracker.values:
        return attrs.evolve(tracker, values=SHOWN)
    return tracker


@node
class Grpo(PolicyGradientFeature):
    """Group relative policy optimization (GRPO; Shao et al., 2024, arXiv 2402.03300).

    The options are those of [`PolicyGradientFeature`](docs/rl.md).
    """

    method = "grpo"


@node
class DrGrpo(PolicyGradientFeature):
    """GRPO without its biases toward long wrong answers and easy or hard examples (Liu et al., 2025, arXiv 2503.20783).

    The options are those of [`PolicyGradientFeature`](docs/rl.md).
    """

    method = "dr-grpo"


@node
class Dapo(PolicyGradientFeature):
    """DAPO: a higher upper clip, a mean over tokens, and new examples for dead groups (Yu et al., 2025, arXiv 2503.14476).

    The options are those of [`PolicyGradientFeature`](docs/rl.md).
    """

    method = "dapo"
    dead_groups = "resample"


@node
class Gspo(PolicyGradientFeature):
    """Group sequence policy optimization (GSPO; Zheng et al., 2025, arXiv 2507.18071).

    The options are those of [`PolicyGradientFeature`](docs/rl.md).
    """

    method = "gspo"


@node
class Rloo(PolicyGradientFeature):
    """REINFORCE with a leave-one-out baseline (RLOO; Ahmadian et al., 2024, arXiv 2402.14740).

    The options are those of [`PolicyGradientFeature`](docs/rl.md).
    """

    method = "rloo"


@node
class ReinforcePp(PolicyGradientFeature):
    """REINFORCE++: rewards standardized over the batch (Hu et al., 2025, arXiv 2501.03262).

    The options are those of [`PolicyGradientFeature`](docs/rl.md).
    """

    method = "reinforce-pp"


@node
class Cispo(PolicyGradientFeature):
    """Clipped importance-sampling weights (CISPO; MiniMax, 2025, arXiv 2506.13585).

    The options are those of [`PolicyGradientFeature`](docs/rl.md).
    """

    method = "cispo"


@node
class Ppo(PolicyGradientFeature):
    """Proximal policy optimization (PPO; Schulman et al., 2017, arXiv 1707.06347).

    Values come from a head on the hidden states of the policy, unless `critic` is set. It names a run, a directory in Hugging Face
    format, or other weights to start a separate model from, such as a reward model. `policy` starts it from the initial weights of
    the policy. `critic_learning_rate` gives the critic an optimizer of its own: AdamW with this constant learning rate, and with
    gradients that are clipped at a norm of 1. The other options are those of [`PolicyGradientFeature`](docs/rl.md).
    """

    method = "ppo"

    critic: str | None = None
    critic_learning_rate: float | None = setting(default=None, gt=0)

    def apply(self, cfg: Tree) -> Tree:
        """Add rules for the parameters of the critic."""
        cfg = super().apply(cfg)
        rules = []
        if self.critic is not None and find(self._critic_model(cfg), "decoder.head").get("decoder.head"):
            rules.append(ParameterRule(pattern=f"{CRITIC}.values.model.decoder.head.**", freeze=True))
        if self.critic_learning_rate is not None:
            optimizer = AdamW(learning_rate=self.critic_learning_rate)
            rules.append(ParameterRule(pattern=f"{CRITIC}.**", optimizer=optimizer, max_grad_norm=1.0))
        return _add_rules(cfg, rules) if rules else cfg

    def preset(self, cfg: Node[Any]) -> Preset:
        """Return PPO, with a model of its own for the values if there is a `critic`."""
        preset = super().preset(cfg)
        if self.critic is None:
            return preset
        values = CriticModel.Config()
        if self.critic != POLICY:
            values = CriticModel.Config(model=self._critic_model(cfg), weights=self.critic)
        return attrs.evolve(
            preset, objective=patch(preset.objective, {"critic.values": values, "critic.coefficient": 1.0})
        )

    def _critic_model(self, cfg: Node[Any]) -> Node[Any]:
        return get_model_config(cfg) if self.critic in (None, POLICY) else open_model_config(self.critic)


def _add_rules(cfg: Tree, rules: Sequence[ParameterRule]) -> Tree:
    """Add rules to the learner."""
    old = get_parameter_rules(cfg)
    if old is None:
        raise ConfigError(
            Problem(
                path="learner.rules",
                message="ppo cannot set the critic's rules: the learner has no rules",
                fix="use a learner with rules, such as the core's Learner",
            )
        )
    return patch(cfg, {"learner.rules": (*old, *rules)})


def _remove_critic_rules(cfg: Tree) -> Tree:
    """Remove the rules that match only parameters of a critic, which the objective may not have any more."""
    old = get_parameter_rules(cfg) or ()
    rules = tuple(r for r in old if not (isinstance(r, ParameterRule) and r.pattern.startswith(f"{CRITIC}.")))
    return cfg if rules == old else patch(cfg, {"learner.rules": rules})
