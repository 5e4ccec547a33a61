"""Gradients are the derivatives of the loss."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np

from axlearn_core.config import Node, find, patch, walk
from axlearn_core.config.tree import join
from axlearn_core.contracts.capabilities import HasConstantTerms
from axlearn_core.contracts.experiment import get_objective_config
from axlearn_plugins_transformer.layer_roles import ExpertsRole
from axlearn_plugins_verify.prove import module_calls
from axlearn_plugins_verify.prove.contract import Difference, Outcome
from axlearn_plugins_verify.prove.double_precision import DOUBLE, repeat
from axlearn_plugins_verify.prove.forward import EPSILON, compute_dtype, precise_config
from axlearn_plugins_verify.prove.training_step import STACKED, Gradients, Step, find_module, gradient_errors

STEPS = {"float32": (2.0**-5, 2.0**-6, 2.0**-7), "float64": (2.0**-12, 2.0**-14, 2.0**-16)}
"""Finite-difference step sizes by dtype, relative to the parameters. Rounding allows smaller ones in float64, for which the loss of
a deep model is closer to linear."""
MANY = 0.05
"""If more than this share of the gradients looks wrong in float32, other directions are tried only in float64."""
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
        direction = {path: _direction(step, path, rng) for path in sorted(exact.gradients.keys() - frozen)}
        probes = [probe for path in direction for probe in _probes(step, path)]
        sizes = STEPS[dtype]
        measured = _measure(step, exact.gradients, direction, probes, rounding, sizes)
        wrong_once = [probe for probe in probes if (error := measured[probe]) is not None and error > TOLERANCE]
        if wrong_once and (dtype == DOUBLE or len(wrong_once) <= MANY * len(probes)):
            others: list[Mapping[Probe, float | None]] = []
            for _ in range(DIRECTIONS):
                turned = {
                    path: (rng.choice([-1.0, 1.0], x.shape) * x).astype(np.float32) for path, x in direction.items()
                }
                others.append(_measure(step, exact.gradients, turned, wrong_once, rounding, sizes))
            for probe in wrong_once:
                values = [error for other in others if (error := other[probe]) is not None]
                measured[probe] = float(np.median(values)) if len(values) > DIRECTIONS // 2 else None
        skipped = sum(error is None for error in measured.values())
        errors = {(probe.path, probe.layer): error or 0.0 for probe, error in measured.items()}
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


@attrs.frozen
class Probe:
    """A parameter, or the part of a stacked parameter that belongs to one layer.

    Attributes:
        path: Path of the parameter.
        layer: Index of the layer, or an empty text.
        mask: 1 for the part, 0 for the other layers. The shape is that of the parameter, with size 1 for all other axes.
    """

    path: str
    layer: str
    mask: np.ndarray = attrs.field(eq=False, repr=False)


def _direction(step: Step, path: str, rng: np.random.Generator) -> np.ndarray:
    """Return a random direction of a parameter, with the magnitude of its values. Its numbers are exact in float32."""
    value = np.asarray(step.weights.params[path], np.float64)
    least = 1e-3 * float(np.sqrt(np.mean(np.square(value)))) + 1e-12
    return (np.maximum(np.abs(value), least) * rng.choice([-1.0, 1.0], value.shape)).astype(np.float32)


def _probes(step: Step, path: str) -> list[Probe]:
    """Return the part of each layer of a parameter, or the whole parameter if it is not stacked."""
    axes, shape = step.program.trained.axes[path], step.weights.params[path].shape
    if STACKED not in axes:
        return [Probe(path, "", np.ones([1] * len(shape), np.float32))]
    axis = axes.index(STACKED)
    index = np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return [Probe(path, str(layer), (index == layer).astype(np.float32)) for layer in range(shape[axis])]


def _measure(
    step: Step,
    gradients: Gradients,
    direction: Gradients,
    probes: Sequence[Probe],
    rounding: float,
    sizes: Sequence[float],
) -> dict[Probe, float | None]:
    """Return the error of the derivative of each probe, relative to its typical derivative.

    Args:
        step: The step.
        gradients: Gradients of the parameters.
        direction: Direction to move each parameter in.
        probes: Parts of parameters. Each is moved alone.
        rounding: Error of a loss that rounding explains.
        sizes: Step sizes to try, relative to the direction.

    Returns:
        The errors. None if the differences are too small, or if no two step sizes agree.
    """
    errors: dict[Probe, float | None] = dict.fromkeys(probes)
    differences: dict[Probe, list[float]] = {probe: [] for probe in probes}
    pending = list(probes)
    still = {probe.path: np.zeros_like(probe.mask) for path in direction for probe in _probes(step, path)[:1]}
    for size in sizes:
        if not pending:
            break
        moves = [{**still, probe.path: np.float32(sign * size) * probe.mask} for probe in pending for sign in (1, -1)]
        losses, undecided = step.losses(direction, moves).reshape(-1, 2), []
        for probe, (above, below) in zip(pending, losses, strict=True):
            products = gradients[probe.path] * direction[probe.path] * probe.mask
            derivative, typical = float(np.sum(products)), float(np.linalg.norm(products))
            difference, noise = float(above - below) / (2 * size), rounding / size
            scale = max(typical, abs(difference))
            if noise > LARGEST_NOISE * scale:
                continue
            error = max(0.0, abs(derivative - difference) - noise) / scale
            agrees = any(abs(difference - x) <= TOLERANCE / 2 * scale + noise for x in differences[probe])
            if error <= TOLERANCE or agrees:
                errors[probe] = error
                continue
            differences[probe].append(difference)
            undecided.append(probe)
        pending = undecided
    return errors
