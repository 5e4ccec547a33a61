"""From a config to a program for a set of devices."""

from axlearn_core.compose.functional import Functional
from axlearn_core.compose.program import Experiment, Program, Steps, compose
from axlearn_core.compose.state import TrainState

__all__ = ["Experiment", "Functional", "Program", "Steps", "TrainState", "compose"]
