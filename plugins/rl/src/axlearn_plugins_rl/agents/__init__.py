"""Agents: functions that talk to the policy through a client of the OpenAI API."""

from axlearn_plugins_rl.agents.agent_source import AgentSource

__all__ = ["AgentSource"]
