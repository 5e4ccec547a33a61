"""Predict the time of a training step from its roofline and from published or measured steps.

    seconds = (compute / efficiency + exposed * (links + network)) * (chips / 256) ** scale

The efficiency is fitted for each target, and multiplied by a factor for grouped matmuls (experts). The exposed share of the
communication, which does not overlap with compute, is fitted for each platform. A step is never shorter than its communication.
`steps.toml` lists the steps with their citations and the fitted coefficients. `benchmarks/step_times.py` repeats the fit and
prints the leave-one-out error for each step.
"""

import math
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import attrs

from axlearn_core.contracts.target import Machine
from axlearn_core.kernels.selection import Choice
from axlearn_plugins_plan.roofline import Roofline

BASE_CHIPS = 256


@attrs.frozen(kw_only=True)
class Step:
    """A published or measured step, and the roofline of our program for the same workload.

    Attributes:
        seconds: Time of the step.
        compute, links, network: Seconds at the roofline of our compiled program.
        grouped: Whether most FLOPs are in experts.
        system: System that ran the step. The roofline always comes from our program.
        source: Citation.
    """

    name: str
    target: str
    platform: str
    chips: int
    seconds: float
    compute: float
    links: float
    network: float
    system: str
    source: str
    grouped: bool = False


@attrs.frozen(kw_only=True)
class Model:
    """The fitted coefficients.

    Attributes:
        efficiency: Target -> share of its peak FLOP/s that matmuls reach.
        grouped: Factor applied to the efficiency if most FLOPs are in experts.
        exposed: Platform -> share of the communication that does not overlap with compute.
        scale: Exponent of the factor chips / 256.
        spread: Ratio between predicted and measured time that four out of five steps do not exceed when excluded from the fit.
    """

    efficiency: Mapping[str, float]
    grouped: float
    exposed: Mapping[str, float]
    scale: float
    spread: float

    def seconds(self, target: str, platform: str, chips: int, bound: Any, *, grouped: bool = False) -> float:
        """Return the predicted seconds of a step. `bound` has the attributes `compute`, `links` and `network`."""
        efficiency = self.efficiency[target] * (self.grouped if grouped else 1.0)
        traffic = bound.links or 0.0, bound.network or 0.0
        busy = max(bound.compute / efficiency + self.exposed.get(platform, 1.0) * sum(traffic), *traffic)
        return busy * max(1.0, chips / BASE_CHIPS) ** self.scale


@attrs.frozen(kw_only=True)
class Prediction:
    """A predicted step.

    Attributes:
        seconds: Predicted time of the step.
        low, high: Range around the prediction. For four out of five known steps, the measured time falls within this range
            when the step is excluded from the fit. `high` is None if `unknown` is not empty.
        steps: Number of steps in the fit that ran on the target.
        trainings: Number of distinct training workloads among these steps. Different systems may have run the same
            workload.
        sources: Citations of the steps.
        unknown: Ops of the program that no known step ran. Their time may be many times that of other ops with the same FLOPs.
    """

    seconds: float
    low: float
    high: float | None
    steps: int
    trainings: int
    sources: tuple[str, ...]
    unknown: tuple[str, ...] = ()


@cache
def load_measurements() -> tuple[tuple[Step, ...], Model]:
    """Load the steps and the fitted coefficients from `steps.toml`."""
    table = _load_table()
    return tuple(Step(**row) for row in table["step"]), Model(**table["model"])


@cache
def _load_table() -> Mapping[str, Any]:
    return tomllib.loads(files("axlearn_plugins_plan").joinpath("steps.toml").read_text("utf-8"))


def unknown_ops(choices: Iterable[Choice]) -> tuple[str, ...]:
    """Return the names of the ops in a program that no known step ran."""
    return tuple(sorted({choice.op.name for choice in choices} - {*_load_table()["ops"]}))


def predict(
    machine: Machine, bound: Roofline, *, grouped: bool = False, unknown: tuple[str, ...] = ()
) -> Prediction | None:
    """Predict the time of a training step, or return None if the target has no known steps or the plan lacks a number.

    Args:
        machine: Machine that runs the step.
        bound: Roofline of the step.
        grouped: Whether most FLOPs are in experts.
        unknown: Result of `unknown_ops`. The predicted time assumes that these ops reach the efficiency of the others.
    """
    steps, model = load_measurements()
    name = machine.target.name
    target_steps = [s for s in steps if s.target == name]
    if not target_steps or bound.compute is None or name not in model.efficiency:
        return None
    seconds = model.seconds(name, machine.target.platform, machine.chips, bound, grouped=grouped)
    seconds = max(seconds, bound.hbm or 0.0)
    return Prediction(
        seconds=seconds,
        low=min(seconds / model.spread, max(bound.step or 0.0, bound.compute)) if unknown else seconds / model.spread,
        high=None if unknown else seconds * model.spread,
        unknown=unknown,
        steps=len(target_steps),
        trainings=len({s.name for s in target_steps}),
        sources=tuple(dict.fromkeys(s.source for s in target_steps)),
    )


def log_ratio(model: Model, step: Step) -> float:
    """Return the logarithm of the ratio of predicted to measured time."""
    predicted = model.seconds(step.target, step.platform, step.chips, step, grouped=step.grouped)
    return math.log(predicted / step.seconds)
