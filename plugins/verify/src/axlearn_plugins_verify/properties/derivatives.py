"""Gradients are the derivatives of the loss."""

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import numpy as np

from axlearn_core.compose import ModelWeights
from axlearn_core.config import Node, find, patch, walk
from axlearn_core.config.tree import join
from axlearn_core.contracts.capabilities import HasConstantTerms
from axlearn_core.contracts.experiment import get_objective_config
from axlearn_plugins_transformer.layer_roles import ExpertsRole
from axlearn_plugins_verify.prove import module_calls
from axlearn_plugins_verify.prove.contract import Difference, Outcome
from axlearn_plugins_verify.prove.double_precision import repeat
from axlearn_plugins_verify.prove.forward import EPSILON, compute_dtype, precise_config
from axlearn_plugins_verify.prove.training_step import STACKED, Step, find_module, gradient_errors

STEPS = (2.0**-5, 2.0**-6, 2.0**-7)
"""Finite-difference step sizes, relative to the parameters."""
TOLERANCE = 0.02
"""Largest error of a derivative, relative to the typical derivative in a random direction."""
ROUNDING = 8
"""Relative error of a loss that rounding explains, in units of the dtype's epsilon."""
LARGEST_NOISE = 0.2
"""A difference is inconclusive if its rounding error, relative to the typical derivative, exceeds this."""
LARGEST_SHARE = 0.5
"""If more than this share of the gradients has no usable difference, nothing is compared."""
JUMP = 1e-3
"""The loss is not smooth if a gradient changes by more than this when the parameters move by their rounding error."""
DIRECTIONS = 5
"""Number of directions to try if a derivative is off in the first one. Most must be measurable; the median error counts."""


class Derivatives:
    """Moves each parameter in a random direction, and compares the change in the loss with the gradient.

    The step is computed in float32 if the config has a 16-bit dtype, and every token uses all experts, because the loss jumps
    if a router chooses different experts. A difference counts if two step sizes agree on it. If the loss is not smooth, as with
    quantized weights, nothing is compared.
    """

    summary: ClassVar[str] = "gradients are the derivatives of the loss"

    def skip_reason(self, case: Any) -> str | None:
        """Skip objectives with terms that depend on the parameters and have no gradient."""
        for path, part in find(get_objective_config(case.config), Node).items():
            if isinstance(part, HasConstantTerms) and part.constant_terms:
                name = join("objective", path) if path else "objective"
                return f"the gradients of {name} treat {part.constant_terms} as constants"
        return None

    def check(self, case: Any) -> Outcome:
        """Compare each gradient with differences of the loss.

        If a gradient is wrong, or if many are inconclusive in float32, float64 decides.
        """
        config = with_all_experts(precise_config(case.config))
        with module_calls.without_location():
            outcome, skipped = self._check(case, config)
        if not outcome.holds or skipped > LARGEST_SHARE:
            return repeat(case, outcome, config, lambda precise: self._check(case, precise)[0])
        more = f"; {skipped:.0%} of them are too small or not smooth" if skipped else ""
        return attrs.evolve(outcome, compared=f"{outcome.compared}{more}")

    def _check(self, case: Any, config: Any) -> tuple[Outcome, float]:
        """Return the outcome, and the share of the gradients that could not be compared."""
        program = case.program(config)
        step = Step(program=program, weights=case.weights(config), batch=case.batch(case.seed))
        exact, rng = step.evaluate(), np.random.default_rng(case.seed)
        dtype = compute_dtype(config)
        rounding = ROUNDING * float(np.finfo(dtype).eps) * abs(exact.loss)
        frozen = set(program.function("train").frozen)
        errors: dict[tuple[str, str], float] = {}
        skipped = 0
        for path in sorted(exact.gradients.keys() - frozen):
            for layer, direction in _directions(step, path, rng).items():
                error = _error(step, path, direction, exact.gradients[path], rounding)
                if error is not None and error > TOLERANCE:
                    signs = [rng.choice([-1.0, 1.0], direction.shape) for _ in range(DIRECTIONS)]
                    others = [_error(step, path, s * direction, exact.gradients[path], rounding) for s in signs]
                    measured = [e for e in others if e is not None]
                    error = float(np.median(measured)) if len(measured) > DIRECTIONS // 2 else None
                skipped += error is None
                errors[path, layer] = error or 0.0
        moved = gradient_errors(exact.gradients, step.evaluate(EPSILON[dtype]).gradients)
        # In these cases, any differences that agree do so by chance.
        if max(moved.values()) > JUMP or skipped > LARGEST_SHARE * len(errors):
            errors, skipped = dict.fromkeys(errors, 0.0), len(errors)
        wrong = {key: error for key, error in errors.items() if error > TOLERANCE}
        outcome = Outcome(
            error=max(errors.values(), default=0.0),
            tolerance=TOLERANCE,
            compared=f"{len(errors)} gradients with differences of the loss",
            difference=_locate(step, wrong) if wrong else None,
        )
        return outcome, skipped / max(1, len(errors))


def with_all_experts(config: Any) -> Any:
    """Return the config with routers that choose every expert."""
    experts = find(config.model, ExpertsRole)
    edits = {f"model.{path}.top_k": node.num_experts for path, node in experts.items()}
    values = dict(walk(config.model))
    for path in values:
        if path.endswith(".top_groups"):  # a router that first chooses groups of experts
            edits[f"model.{path}"] = values[f"{path.removesuffix('top_groups')}num_groups"]
    return patch(config, edits) if edits else config


def _locate(step: Step, wrong: Mapping[tuple[str, str], float]) -> Difference:
    """Name the wrong gradient that the backward pass computes first: the gradient of the module that is called last."""
    if not module_calls.is_located():
        return module_calls.unlocated(max(wrong.values()))
    calls = {record.layer: index for index, record in enumerate(step.trace()[1])}
    modules = {key: find_module(*key, calls) for key in wrong}
    path, layer = max(wrong, key=lambda key: (calls.get(modules[key], -1), wrong[key]))
    more = f"; {len(wrong)} gradients differ" if len(wrong) > 1 else ""
    return Difference(
        layer=modules[path, layer],
        tensor=f"gradient of {path}",
        error=wrong[path, layer],
        detail=f"differs from the change in the loss{more}",
    )


def _directions(step: Step, path: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return one random direction per layer of a parameter.

    Each direction has the magnitude of the parameter's values in its layer, and is zero in all other layers.
    """
    value = np.asarray(step.weights.params[path], np.float64)
    least = 1e-3 * float(np.sqrt(np.mean(np.square(value)))) + 1e-12
    direction = np.maximum(np.abs(value), least) * rng.choice([-1.0, 1.0], value.shape)
    axes = step.program.trained.axes[path]
    if STACKED not in axes:
        return {"": direction}
    axis = axes.index(STACKED)
    index = np.arange(value.shape[axis]).reshape([-1 if i == axis else 1 for i in range(value.ndim)])
    return {str(i): np.where(index == i, direction, 0.0) for i in range(value.shape[axis])}


def _error(step: Step, path: str, direction: np.ndarray, gradient: np.ndarray, rounding: float) -> float | None:
    """Return the error of a derivative, relative to the typical derivative.

    Args:
        step: The step.
        path: Path of the parameter.
        direction: Direction to move the parameter in.
        gradient: Gradient of the parameter.
        rounding: Error of a loss that rounding explains.

    Returns:
        The error. None if the differences are too small, or if no two step sizes agree.
    """
    derivative, typical = float(np.sum(gradient * direction)), float(np.linalg.norm(gradient * direction))
    differences: list[float] = []
    for size in STEPS:
        difference, noise = _difference(step, path, direction, size), rounding / size
        scale = max(typical, abs(difference))
        if noise > LARGEST_NOISE * scale:
            return None
        error = max(0.0, abs(derivative - difference) - noise) / scale
        agrees = any(abs(difference - other) <= TOLERANCE / 2 * scale + noise for other in differences)
        if error <= TOLERANCE or agrees:
            return error
        differences.append(difference)
    return None


def _difference(step: Step, path: str, direction: np.ndarray, size: float) -> float:
    """Return the central difference of the loss in a direction of one parameter."""
    losses = []
    for sign in (1.0, -1.0):
        value = np.asarray(step.weights.params[path], np.float64) + sign * size * direction
        moved = {**step.weights.params, path: value.astype(step.weights.params[path].dtype)}
        losses.append(attrs.evolve(step, weights=ModelWeights(moved, step.weights.variables)).evaluate().loss)
    return (losses[0] - losses[1]) / (2 * size)
