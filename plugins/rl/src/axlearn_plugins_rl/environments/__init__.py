"""Rollouts in several turns: the conversation as tokens, environments, and adapters of environment libraries."""

from axlearn_plugins_rl.environments.tool_environment import ToolEnvironment

__all__ = ["ToolEnvironment"]
