"""The trainer: state, step, loop, run directory, trackers."""

from axlearn_core.train.api import train
from axlearn_core.train.evaluators import Evaluator, LossEvaluator, SampleEvaluator
from axlearn_core.train.load import Loaded, load
from axlearn_core.train.loop import TrainLoop
from axlearn_core.train.trainer import Result, Trainer

__all__ = [
    "Evaluator", "Loaded", "LossEvaluator", "Result", "SampleEvaluator", "TrainLoop", "Trainer", "load", "train",
]  # fmt: skip
