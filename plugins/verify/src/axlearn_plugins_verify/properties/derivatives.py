"""Gradients are the derivatives of the loss."""

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import numpy as np

from axlearn_core.compose import ModelWeights
from axlearn_plugins_verify.prove.contract import Difference, Outcome
from axlearn_plugins_verify.prove.forward import precise_config
from axlearn_plugins_verify.prove.training_step import STACKED, Step, find_module

STEP = 2.0**-7
"""Relative change of the parameters for a difference."""
SMALLER = 8
"""Ratio of the two step sizes."""
TOLERANCE = 0.02
"""Largest error of a derivative, relative to the typical derivative in a random direction."""
ROUNDING = 8 * float(np.finfo(np.float32).eps)
"""Relative error of a loss that rounding explains."""
CURVED = 0.01
"""Disagreement of two step sizes from which a difference says nothing about the derivative."""


class Derivatives:
    """Moves each parameter in a random direction, and compares the change of the loss to the gradient.

    The step is computed in float32 if the config has a 16-bit dtype. A parameter is left out if two step sizes disagree, as
    they do if the loss has steps, for example because a router chooses other experts.
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
        floor, frozen = ROUNDING * abs(exact.loss) / STEP, set(program.function("train").frozen)
        errors: dict[tuple[str, str], float] = {}
        rough = 0
        for path in sorted(exact.gradients.keys() - frozen):
            for layer, direction in _directions(step, path, rng).items():
                error = _error(step, path, direction, exact.gradients[path], floor)
                rough += error is None
                errors[path, layer] = error or 0.0
        wrong = {key: error for key, error in errors.items() if error > TOLERANCE}
        skipped = f"; the loss has steps for {rough} of them" if rough else ""
        return Outcome(
            error=max(errors.values(), default=0.0),
            tolerance=TOLERANCE,
            compared=f"{len(errors)} gradients with differences of the loss{skipped}",
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


def _error(step: Step, path: str, direction: np.ndarray, gradient: np.ndarray, floor: float) -> float | None:
    """Return the error of a derivative, relative to the typical one. None if two step sizes disagree."""
    far, near = (_difference(step, path, direction, size) for size in (STEP, STEP / SMALLER))
    scale = max(float(np.linalg.norm(gradient * direction)), abs(far)) + floor
    if abs(near - far) > CURVED * scale + SMALLER * floor:
        return None
    return max(0.0, abs(float(np.sum(gradient * direction)) - far) - floor) / scale


def _difference(step: Step, path: str, direction: np.ndarray, size: float) -> float:
    """Return the central difference of the loss in a direction of one parameter."""
    losses = []
    for sign in (1.0, -1.0):
        value = np.asarray(step.weights.params[path], np.float64) + sign * size * direction
        moved = {**step.weights.params, path: value.astype(step.weights.params[path].dtype)}
        losses.append(attrs.evolve(step, weights=ModelWeights(moved, step.weights.variables)).evaluate().loss)
    return (losses[0] - losses[1]) / (2 * size)
