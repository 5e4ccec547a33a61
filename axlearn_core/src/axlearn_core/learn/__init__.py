"""Learners, optimizers, and schedules, based on optax."""

from axlearn_core.learn.accumulate import value_and_grad, without_state
from axlearn_core.learn.learner import Learner, LearnerState, ParameterRule, global_norm
from axlearn_core.learn.optimizers import AdamW, Optimizer
from axlearn_core.learn.paths import flatten, format_key_path, select, unflatten
from axlearn_core.learn.schedules import Constant, Cosine, Linear, Schedule, WarmupStableDecay

__all__ = [
    "AdamW", "Constant", "Cosine", "Learner", "LearnerState", "Linear", "Optimizer", "ParameterRule",
    "Schedule", "WarmupStableDecay", "flatten", "format_key_path", "global_norm", "select", "unflatten",
    "value_and_grad", "without_state",
]  # fmt: skip
