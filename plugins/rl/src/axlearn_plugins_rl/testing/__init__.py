"""Conformance suites for this plugin's slots, like those in `axlearn_testing`, and a policy without a model. They need pytest."""

import pytest

for _module in ("buffers", "environments", "rewards", "sources", "tasks"):
    pytest.register_assert_rewrite(f"{__name__}.{_module}")  # must come before the import

from axlearn_plugins_rl.testing.buffers import BufferSuite  # noqa: E402
from axlearn_plugins_rl.testing.environments import EnvironmentSuite  # noqa: E402
from axlearn_plugins_rl.testing.rewards import RewardSuite  # noqa: E402
from axlearn_plugins_rl.testing.rollouts import STRANGE_TEXTS, answer_rollout  # noqa: E402
from axlearn_plugins_rl.testing.scripted_policy import ScriptedPolicy  # noqa: E402
from axlearn_plugins_rl.testing.sources import RolloutSourceSuite  # noqa: E402
from axlearn_plugins_rl.testing.tasks import TaskSuite  # noqa: E402

__all__ = [
    "STRANGE_TEXTS", "BufferSuite", "EnvironmentSuite", "RewardSuite", "RolloutSourceSuite", "ScriptedPolicy", "TaskSuite",
    "answer_rollout",
]  # fmt: skip
