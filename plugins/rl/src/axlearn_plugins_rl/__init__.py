"""Reinforcement learning: rollouts, rewards, advantages and policy-gradient objectives."""
