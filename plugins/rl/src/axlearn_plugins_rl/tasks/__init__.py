"""Tasks: sets of problems for reinforcement learning."""

from axlearn_plugins_rl.rollout_contracts import Example, Task
from axlearn_plugins_rl.tasks.generated_task import GeneratedTask

__all__ = ["Example", "GeneratedTask", "Task"]
