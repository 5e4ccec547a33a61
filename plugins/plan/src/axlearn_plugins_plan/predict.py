"""The time of a training step, predicted from its roofline and from steps that were published or measured.

    seconds = (compute / efficiency + exposed * (links + network)) * (chips / 256) ** scale

with an efficiency for each target, one factor for products of groups of rows (experts), and for each platform the share of the
communication that a step waits for; and no step is shorter than what it sends. `steps.toml` has the steps with their citations,
and what was fitted to them (`benchmarks/step_times.py` fits anew, and prints the error of each step when it is left out).
"""

import math
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import attrs

from axlearn_core.contracts.target import Machine
from axlearn_plugins_plan.roofline import Roofline

BASE_CHIPS = 256


@attrs.frozen(kw_only=True)
class Step:
    """A published or measured step, and what the plan says of the program.

    Attributes:
        seconds: of a step.
        compute, links, network: seconds at the roofline, of our compiled program.
        grouped: whether experts are most of it.
        system: whose program it was; ours is compiled for AXLearn's, and others stand in for it.
        source: the citation.
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
    """What was fitted.

    Attributes:
        efficiency: target -> the share of its peak that products reach.
        grouped: the factor of the efficiency where experts are most of the work.
        exposed: platform -> the share of the communication that a step waits for.
        scale: the exponent of the number of chips.
        spread: the ratio between prediction and step that four of five steps keep, each left out of the fit.
    """

    efficiency: Mapping[str, float]
    grouped: float
    exposed: Mapping[str, float]
    scale: float
    spread: float

    def seconds(self, target: str, platform: str, chips: int, bound: Any, *, grouped: bool = False) -> float:
        """Of a step whose `compute`, `links` and `network` are those of `bound`."""
        efficiency = self.efficiency[target] * (self.grouped if grouped else 1.0)
        traffic = bound.links or 0.0, bound.network or 0.0
        busy = max(bound.compute / efficiency + self.exposed.get(platform, 1.0) * sum(traffic), *traffic)
        return busy * max(1.0, chips / BASE_CHIPS) ** self.scale


@attrs.frozen(kw_only=True)
class Prediction:
    """A predicted step.

    Attributes:
        seconds: the prediction.
        low, high: between which four of five of the known steps lie, relative to a prediction that did not know them.
        steps: how many steps of the target were fitted.
        trainings: how many different trainings they are of; steps of several systems may be of one.
        sources: their citations.
    """

    seconds: float
    low: float
    high: float
    steps: int
    trainings: int
    sources: tuple[str, ...]


@cache
def load_measurements() -> tuple[tuple[Step, ...], Model]:
    """The steps of `steps.toml`, and what was fitted to them."""
    table = tomllib.loads(files("axlearn_plugins_plan").joinpath("steps.toml").read_text("utf-8"))
    return tuple(Step(**row) for row in table["step"]), Model(**table["model"])


def predict(machine: Machine, bound: Roofline, *, grouped: bool = False) -> Prediction | None:
    """The time of a training step; None where no step on this target is known, or the plan lacks a figure."""
    steps, model = load_measurements()
    name = machine.target.name
    own_steps = [s for s in steps if s.target == name]
    if not own_steps or bound.compute is None or name not in model.efficiency:
        return None
    seconds = model.seconds(name, machine.target.platform, machine.chips, bound, grouped=grouped)
    # What moves to and from memory bounds every step.
    seconds = max(seconds, bound.hbm or 0.0)
    return Prediction(
        seconds=seconds,
        low=seconds / model.spread,
        high=seconds * model.spread,
        steps=len(own_steps),
        trainings=len({s.name for s in own_steps}),
        sources=tuple(dict.fromkeys(s.source for s in own_steps)),
    )


def log_ratio(model: Model, step: Step) -> float:
    """The logarithm of prediction over step."""
    predicted = model.seconds(step.target, step.platform, step.chips, step, grouped=step.grouped)
    return math.log(predicted / step.seconds)
