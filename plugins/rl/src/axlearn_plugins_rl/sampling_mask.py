"""The feature `sampling-mask`."""

from typing import Any, TypeVar

import attrs

from axlearn_core.config import Node, find, get_options, node, patch, setting
from axlearn_core.config.tree import edit_nodes
from axlearn_core.contracts.experiment import get_input_config, get_loop_config
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_rl.engine_policy import EnginePolicy
from axlearn_plugins_rl.task_input import TaskInput
from axlearn_plugins_serving.runner import ModelRunner

Tree = TypeVar("Tree", bound=Node[Any])
MORE = 32
"""Tokens to record in addition to `top_k`, because tokens with equal logits are all kept."""


@node
class SamplingMask(Feature):
    """Limits the tokens to sample from, and uses the same limits in the training step (DeepSeek-AI, 2025, arXiv 2512.02556).

    Rollouts sample from the `top_k` (50) most likely tokens, further limited by `top_p` and `min_p`. They record the tokens that
    were kept, and the training step computes log-probabilities among these, so the ratios of the objective start at 1. It needs a
    method with rollouts such as `grpo`.
    """

    stage = "wrap"
    example = "top_k=20,top_p=0.95"
    example_needs = ("grpo",)

    top_k: int = setting(default=50, ge=1, le=4096)
    top_p: float | None = setting(default=None, gt=0, le=1)
    min_p: float | None = setting(default=None, ge=0, le=1)

    def apply(self, cfg: Tree) -> Tree:
        """Set the limits of the policy, and record the tokens in the rows of a batch."""
        old, loop = get_input_config(cfg), get_loop_config(cfg)
        if not isinstance(old, TaskInput.Config) or not find(loop, EnginePolicy.Config):
            raise ConfigError(
                Problem(
                    path="input",
                    message="sampling-mask needs rollouts",
                    expected="a task-input, and a loop with an engine-policy",
                    fix="add a method such as grpo, or remove sampling-mask",
                )
            )
        no_match = Problem(path="loop", message="sampling-mask finds no engine-policy", fix="remove sampling-mask")
        loop = edit_nodes(loop, lambda _, n: self._limit(n), no_match=no_match)
        return patch(cfg, {"input": attrs.evolve(old, kept_tokens=self.top_k + MORE), "loop": loop})

    def _limit(self, policy: Any) -> Any:
        if not isinstance(policy, EnginePolicy.Config):
            return None
        runner: Any = policy.engine.runner
        if not isinstance(runner, ModelRunner.Config):
            return None
        engine = attrs.evolve(policy.engine, runner=attrs.evolve(runner, kept_tokens=self.top_k + MORE))
        return attrs.evolve(policy, engine=engine, top_k=self.top_k, **get_options(self, "top_p", "min_p"))
