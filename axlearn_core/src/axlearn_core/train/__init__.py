"""The trainer: training step, loop, session, evaluators, and trackers. Names are imported on first use."""

from typing import TYPE_CHECKING

from axlearn_core.compat import lazy_names, make_callable

if TYPE_CHECKING:
    from axlearn_core.train.api import train
    from axlearn_core.train.evaluators import Evaluator, LossEvaluator
    from axlearn_core.train.inference import LoadedModel, load
    from axlearn_core.train.loop import TrainLoop
    from axlearn_core.train.trainer import Result, Trainer

__all__ = [
    "Evaluator", "LoadedModel", "LossEvaluator", "Result", "TrainLoop", "Trainer", "load", "train",
]  # fmt: skip

_MODULES = {
    "train": "api", "Evaluator": "evaluators", "LossEvaluator": "evaluators",
    "LoadedModel": "inference", "load": "inference", "TrainLoop": "loop", "Result": "trainer", "Trainer": "trainer",
}  # fmt: skip


make_callable(__name__)


__getattr__ = lazy_names(__name__, _MODULES)  # so that code that only reads a run's files does not import JAX
