"""Gradients are the derivatives of the loss."""

import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import numpy as np

from axlearn_core.compose import ModelWeights
from axlearn_plugins_verify.prove.contract import Difference, Outcome
from axlearn_plugins_verify.prove.forward import precise_config
from axlearn_plugins_verify.prove.training_step import STACKED, Step, find_module

STEPS = (2.0**-5, 2.0**-7, 2.0**-9)
"""Relative changes of the parameters for a difference."""
TOLERANCE = 0.02
"""Largest error of a derivative, relative to the typical derivative in a random direction."""
ROUNDING = 8 * float(np.finfo(np.float32).eps)
"""Relative error of a loss that rounding explains."""
DIRECTIONS = 3
"""Number of other directions in which a derivative must be wrong, too."""
CURVED = 0.1
"""Disagreement of two step sizes from which their differences say nothing about the derivative."""


class Derivatives:
    """Moves each parameter in a random direction, and compares the change of the loss to the gradient.

    The step is computed in float32 if the config has a 16-bit dtype. A gradient is right if it equals the difference for one of
    the step sizes: the others may cross a jump of the loss, for example because a router chooses other experts. It is wrong if
    two step sizes agree on another derivative, in several directions.
    """

    summary: ClassVar[str] = "gradients are the derivatives of the loss"

    def skip_reason(self, case: Any) -> str | None:
        """Always check."""
        return None

    def check(self, case: Any) -> Outcome:
        """Compare each gradient with differences of the loss."""
        config = precise_config(case.config)
        program = case.program(config)
        step = Step(program=program, weights=case.weights(config), batch=case.batch(case.seed))
        exact, rng = step.evaluate(), np.random.default_rng(case.seed)
        floor, frozen = ROUNDING * abs(exact.loss), set(program.function("train").frozen)
        errors: dict[tuple[str, str], float] = {}
        for path in sorted(exact.gradients.keys() - frozen):
            for layer, direction in _directions(step, path, rng).items():
                error = _error(step, path, direction, exact.gradients[path], floor)
                for _ in range(DIRECTIONS if error > TOLERANCE else 0):
                    signs = rng.choice([-1.0, 1.0], direction.shape)
                    error = min(error, _error(step, path, signs * direction, exact.gradients[path], floor))
                errors[path, layer] = error
        wrong = {key: error for key, error in errors.items() if error > TOLERANCE}
        return Outcome(
            error=max(errors.values(), default=0.0),
            tolerance=TOLERANCE,
            compared=f"{len(errors)} gradients with differences of the loss",
            difference=_locate(step, wrong) if wrong else None,
        )


def _locate(step: Step, wrong: Mapping[tuple[str, str], float]) -> Difference:
    """Name the wrong gradient that the backward pass computes first: the one of the module that is called last."""
    calls = {record.layer: index for index, record in enumerate(step.trace()[1])}
    modules = {key: find_module(*key, calls) for key in wrong}
    path, layer = max(wrong, key=lambda key: (calls.get(modules[key], -1), wrong[key]))
    more = f"; {len(wrong)} gradients differ" if len(wrong) > 1 else ""
    return Difference(
        layer=modules[path, layer],
        tensor=f"gradient of {path}",
        error=wrong[path, layer],
        detail=f"differs from the change of the loss{more}",
    )


def _directions(step: Step, path: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return a random direction for each layer of a parameter, as large as its values and zero in the other layers."""
    value = np.asarray(step.weights.params[path], np.float64)
    least = 1e-3 * float(np.sqrt(np.mean(np.square(value)))) + 1e-12
    direction = np.maximum(np.abs(value), least) * rng.choice([-1.0, 1.0], value.shape)
    axes = step.program.trained.axes[path]
    if STACKED not in axes:
        return {"": direction}
    axis = axes.index(STACKED)
    index = np.arange(value.shape[axis]).reshape([-1 if i == axis else 1 for i in range(value.ndim)])
    return {str(i): np.where(index == i, direction, 0.0) for i in range(value.shape[axis])}


def _error(step: Step, path: str, direction: np.ndarray, gradient: np.ndarray, floor: float) -> float:
    """Return the error of a derivative relative to the typical derivative, or 0 if the step sizes disagree about it.

    Args:
        step: The step.
        path: Path of the parameter.
        direction: Direction to move it in.
        gradient: Its gradient.
        floor: Error of a loss that rounding explains.
    """
    derivative, typical = float(np.sum(gradient * direction)), float(np.linalg.norm(gradient * direction))
    differences: list[float] = []
    errors: list[float] = []
    for size in STEPS:
        difference = _difference(step, path, direction, size)
        scale = max(typical, abs(difference)) + floor / size
        errors.append(max(0.0, abs(derivative - difference) - floor / size) / scale)
        if errors[-1] <= TOLERANCE:
            return errors[-1]
        differences.append(difference)
    agree = any(
        abs(one - other) <= CURVED * max(abs(one), abs(other)) for one, other in itertools.pairwise(differences)
    )
    return min(errors) if agree else 0.0


def _difference(step: Step, path: str, direction: np.ndarray, size: float) -> float:
    """Return the central difference of the loss in a direction of one parameter."""
    losses = []
    for sign in (1.0, -1.0):
        value = np.asarray(step.weights.params[path], np.float64) + sign * size * direction
        moved = {**step.weights.params, path: value.astype(step.weights.params[path].dtype)}
        losses.append(attrs.evolve(step, weights=ModelWeights(moved, step.weights.variables)).evaluate().loss)
    return (losses[0] - losses[1]) / (2 * size)
