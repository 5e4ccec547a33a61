"""Gradients are the derivatives of the loss."""

from typing import Any, ClassVar

import attrs
import numpy as np

from axlearn_core.compose import ModelWeights
from axlearn_plugins_verify.prove.contract import Difference, Outcome
from axlearn_plugins_verify.prove.forward import precise_config
from axlearn_plugins_verify.prove.step import Step, find_module, split_layers

STEP = 2.0**-7
"""Relative change of the parameters for a difference."""
SMALLER = 8
"""Ratio of the two step sizes."""
TOLERANCE = 0.05
"""Largest error of a derivative, relative to the typical derivative in a random direction."""
ROUNDING = 8 * float(np.finfo(np.float32).eps)
"""Relative error of a loss that rounding explains."""
CURVED = 0.02
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
        gradients, floor = exact.gradients, ROUNDING * abs(exact.loss) / STEP
        frozen = set(program.function("train").frozen)
        worst, rough, wrong, errors = 0.0, 0, [], {}
        for path, gradient in gradients.items():
            if path in frozen:
                continue
            value = np.asarray(step.weights.params[path], np.float64)
            direction = np.maximum(np.abs(value), 1e-3 * np.sqrt(np.mean(value**2)) + 1e-12) * rng.choice(
                [-1.0, 1.0], value.shape
            )
            far, near = (_difference(step, path, direction, size) for size in (STEP, STEP / SMALLER))
            scale = max(float(np.linalg.norm(gradient * direction)), abs(far))
            if abs(near - far) > CURVED * scale + SMALLER * floor:
                rough += 1
                continue
            error = max(0.0, abs(float(np.sum(gradient * direction)) - far) - floor) / (scale + floor)
            worst = max(worst, error)
            if error > TOLERANCE:
                wrong.append(path)
                errors[path] = error
        difference = self._locate(step, wrong, errors) if wrong else None
        checked = len(gradients) - len(frozen) - rough
        compared = f"the gradients of {checked} parameters with differences of the loss"
        return Outcome(error=worst, tolerance=TOLERANCE, compared=compared, difference=difference)

    def _locate(self, step: Step, wrong: list[str], errors: dict[str, float]) -> Difference:
        """Name the wrong parameter that the backward pass reaches first: the one whose module is called last."""
        calls = {record.layer: index for index, record in enumerate(step.trace()[1])}

        def place(path: str) -> tuple[int, str]:
            layers = split_layers(step.program, path, step.weights.params[path])
            names = [find_module(path, index, calls) for index in layers]
            name = max(names, key=lambda n: calls.get(n, -1))
            return calls.get(name, -1), name

        path = max(wrong, key=lambda p: (place(p)[0], errors[p]))
        more = f"; {len(wrong)} parameters differ" if len(wrong) > 1 else ""
        return Difference(
            layer=place(path)[1], tensor=f"gradient of {path}", error=errors[path], detail=f"differs from the loss{more}"
        )


def _difference(step: Step, path: str, direction: np.ndarray, size: float) -> float:
    """Return the central difference of the loss in a direction of one parameter."""
    losses = []
    for sign in (1.0, -1.0):
        value = np.asarray(step.weights.params[path], np.float64) + sign * size * direction
        moved = {**step.weights.params, path: value.astype(step.weights.params[path].dtype)}
        losses.append(attrs.evolve(step, weights=ModelWeights(moved, step.weights.variables)).evaluate().loss)
    return (losses[0] - losses[1]) / (2 * size)
