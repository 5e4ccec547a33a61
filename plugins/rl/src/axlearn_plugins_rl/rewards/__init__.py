"""Rewards: scores of rollouts."""

from axlearn_plugins_rl.rewards.judged_reward import JudgedReward
from axlearn_plugins_rl.rollout_contracts import Reward, Rollout, Score

__all__ = ["JudgedReward", "Reward", "Rollout", "Score"]
