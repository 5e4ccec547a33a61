"""Compose a config into a program for a set of devices."""

from axlearn_core.compat import make_callable
from axlearn_core.compose.functional import Functional, ModelWeights
from axlearn_core.compose.functions import Array, Function, Part
from axlearn_core.compose.objective import Frozen, FrozenModel, ModelAndObjective, TrainedModel
from axlearn_core.compose.program import Experiment, Program, compose
from axlearn_core.compose.state import TrainState

__all__ = [
    "Array", "Experiment", "Frozen", "FrozenModel", "Function", "Functional", "ModelAndObjective", "ModelWeights", "Part",
    "Program", "TrainState", "TrainedModel", "compose",
]  # fmt: skip

make_callable(__name__)
