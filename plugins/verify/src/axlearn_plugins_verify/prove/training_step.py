"""Compute the loss and the gradients of one training step, and compare two such computations."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import jax
import numpy as np

from axlearn_core.compose import ModelWeights, Program
from axlearn_core.kernels.selection import Selection
from axlearn_core.learn import without_state
from axlearn_plugins_verify.prove import module_calls
from axlearn_plugins_verify.prove.contract import Difference, Outcome
from axlearn_plugins_verify.prove.double_precision import as_double, stop_if_vague
from axlearn_plugins_verify.prove.forward import EPSILON, Select, compute_dtype, perturbed
from axlearn_plugins_verify.prove.reuse import reuse

FLOOR = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 1e-2, "float16": 5e-3}
"""Error of a gradient that rounding alone causes, relative to its norm."""
MOVES = 2
"""Number of random perturbations of the parameters that measure rounding."""
SMALL = 0.01
"""The error of a gradient with a small norm is relative to this fraction of the norm of all gradients."""
LOSSES = 64
"""Number of losses that one call computes."""
STACKED = "layers"
"""Logical axis of stacked parameters."""

Gradients = Mapping[str, np.ndarray]


@attrs.frozen(eq=False)
class Gradient:
    """The loss and the gradients of a step.

    Attributes:
        loss: Mean loss.
        gradients: Gradients by path, float64.
    """

    loss: float
    gradients: Gradients


@attrs.frozen(kw_only=True, eq=False)
class Step:
    """A computation of the loss and the gradients of a batch.

    Attributes:
        program: Program of the config.
        weights: Weights of the model and its objective.
        batch: Arrays of the batch by name.
        kernels: Kernels to use instead of the program's own.
        select: Selects the comparable part of a recorded array [B, S, ...].
    """

    program: Program
    weights: ModelWeights
    batch: Mapping[str, Any]
    kernels: Selection | None = None
    select: Select = lambda x: x

    def evaluate(self, perturb: float = 0.0, seed: int = 0) -> Gradient:
        """Return the loss and the gradients, with parameters moved by a random multiple of `perturb` times their magnitude."""
        compute = reuse(
            self.program,
            ("step", self.kernels),
            lambda: self.program.compile_trial(functools.partial(_compute, self.program), kernels=self.kernels),
        )
        weights = self._placed(ModelWeights(perturbed(self.weights.params, perturb, seed), self.weights.variables))
        loss, gradients = jax.device_get(
            compute(weights.params, weights.variables, self.program.put(as_double(self.batch)))
        )
        return Gradient(float(loss), {p: np.asarray(g, np.float64) for p, g in gradients.items()})

    def losses(self, direction: Gradients, moves: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray:
        """Return the losses after different moves of the parameters, float64.

        One function computes all of them, without gradients.

        Args:
            direction: Direction of each parameter that moves.
            moves: For each loss, the distance that each of these parameters moves in its direction. The shape is that of the
                parameter, with axes of size 1.
        """
        compute = reuse(
            self.program,
            ("losses", self.kernels),
            lambda: self.program.compile_trial(functools.partial(_losses, self.program), kernels=self.kernels),
        )
        weights, batch = self._placed(self.weights), self.program.put(as_double(self.batch))
        results: list[np.ndarray] = []
        for begin in range(0, len(moves), LOSSES):
            part = [*moves[begin : begin + LOSSES]]
            part += [moves[0]] * (LOSSES - len(part))
            stacked = {path: np.stack([move[path] for move in part]) for path in direction}
            losses = compute(weights.params, weights.variables, batch, dict(direction), stacked)
            results.append(np.asarray(jax.device_get(losses), np.float64))
        return np.concatenate(results)[: len(moves)]

    def _placed(self, weights: ModelWeights) -> ModelWeights:
        return jax.tree.map(lambda x, spec: jax.device_put(x, spec.sharding), weights, self.program.trained_spec)

    def compute(self, params: Any, variables: Any, batch: Any) -> tuple[jax.Array, Any]:
        """Return the loss and the gradients. Traceable."""
        return _compute(self.program, params, variables, batch)

    def trace(self) -> tuple[dict[str, float], list[module_calls.Record]]:
        """Compute the loss again. Return the scalars that it reports, and the calls of modules."""
        run = self.program.compile_trial(self.program.function("loss").call, kernels=self.kernels)
        model = self.program.functional.describe()
        (_, scalars), records = module_calls.record_calls(
            model, run, self._placed(self.weights), self.program.put(as_double(self.batch))
        )
        return {name: float(value) for name, value in scalars.items()}, records

    def select_record(self, value: np.ndarray) -> np.ndarray | None:
        """Select the comparable part of a recorded array, or None if it has no rows and positions."""
        shapes = {x.shape[:2] for x in self.batch.values() if x.ndim >= 2}
        return self.select(value) if value.shape[:2] in shapes else None


def _compute(program: Program, params: Any, variables: Any, batch: Any) -> tuple[jax.Array, Any]:
    config: Any = program.config
    learner = config.learner.build(max_steps=config.max_steps, axes=program.trained.axes)
    call = program.function("loss").call
    loss = without_state(lambda p, b: call(ModelWeights(p, variables), b))
    (loss, *_), gradients = learner.value_and_grad(loss, params, {}, batch, None)
    return loss, gradients


def _losses(program: Program, params: Any, variables: Any, batch: Any, direction: Any, moves: Any) -> jax.Array:
    def one(move: Any) -> jax.Array:
        moved = {path: (params[path] + move[path] * direction[path]).astype(params[path].dtype) for path in direction}
        return _compute(program, {**params, **moved}, variables, batch)[0]

    return jax.lax.map(one, moves)


def compare_steps(one: Step, other: Step, *, compared: str, gradients: bool = True) -> Outcome:
    """Compare two computations of one step, and name the first layer that differs if they do.

    Args:
        one: The computation that is assumed to be correct. It also measures the rounding.
        other: The computation to compare.
        compared: What is compared, in one line.
        gradients: Whether to compare gradients too.
    """
    expected, dtype = one.evaluate(), compute_dtype(one.program.config)
    moved = [one.evaluate(EPSILON[dtype], seed) for seed in range(MOVES)]
    loss_tolerance = max(FLOOR[dtype], 4 * max(loss_error(expected.loss, m.loss) for m in moved))
    tolerance = max(
        FLOOR[dtype], 4 * max(max(gradient_errors(expected.gradients, m.gradients).values()) for m in moved)
    )
    stop_if_vague(tolerance if gradients else loss_tolerance, compared)
    actual = other.evaluate()
    scalar, errors = loss_error(expected.loss, actual.loss), gradient_errors(expected.gradients, actual.gradients)
    worst = max(errors.values()) if gradients else 0.0
    wrong = [path for path, error in errors.items() if gradients and not error <= tolerance]
    if scalar <= loss_tolerance and not wrong:
        near = scalar / loss_tolerance > worst / tolerance
        return Outcome(
            error=scalar if near else worst, tolerance=loss_tolerance if near else tolerance, compared=compared
        )
    if not module_calls.is_located():
        error, limit = (scalar, loss_tolerance) if scalar > loss_tolerance else (worst, tolerance)
        return Outcome(error=error, tolerance=limit, compared=compared, difference=module_calls.unlocated(error))
    (scalars, records), (other_scalars, other_records) = one.trace(), other.trace()
    difference = module_calls.first_difference(
        records, other_records, tolerance, one.select_record, other.select_record
    )
    if difference is None and scalar > loss_tolerance:
        difference = _first_scalar(scalars, other_scalars, loss_tolerance) or Difference(
            layer="", tensor="loss", error=scalar
        )
    if difference is None:
        difference = last_gradient(one.program, expected, actual, wrong, tolerance, [r.layer for r in records])
    facts = f"loss {actual.loss:.6g}, expected {expected.loss:.6g}"
    difference = attrs.evolve(difference, detail="; ".join(filter(None, [difference.detail, facts])))
    if scalar > loss_tolerance:
        return Outcome(error=scalar, tolerance=loss_tolerance, compared=compared, difference=difference)
    return Outcome(error=worst, tolerance=tolerance, compared=compared, difference=difference)


def _first_scalar(expected: Mapping[str, float], actual: Mapping[str, float], tolerance: float) -> Difference | None:
    """Return the scalar with the largest relative error among those that the model reports, such as parts of its loss."""
    errors = {n: loss_error(v, actual.get(n, 0.0)) for n, v in expected.items() if n != "weight"}
    wrong = {name: error for name, error in errors.items() if error > tolerance}
    if not wrong:
        return None
    missing = [name for name in wrong if name not in actual]
    name = max(wrong, key=lambda n: (n != "cross_entropy", wrong[n]))  # the model reports it if there are other parts
    detail = f"missing: {', '.join(missing)}" if missing else f"{actual[name]:.6g}, expected {expected[name]:.6g}"
    return Difference(layer="", tensor=name, error=wrong[name], detail=detail)


def loss_error(expected: float, actual: float) -> float:
    """Return the relative error of a loss."""
    if expected == actual:
        return 0.0
    error = abs(actual - expected) / max(abs(expected), 1e-30)
    return error if np.isfinite(error) else float("inf")


def gradient_errors(expected: Gradients, actual: Gradients) -> dict[str, float]:
    """Return the error of each gradient, relative to its norm; see `SMALL`."""
    total = float(np.sqrt(sum(float(np.sum(np.square(g))) for g in expected.values()))) or 1.0
    return {path: _error(gradient, actual[path], SMALL * total) for path, gradient in expected.items()}


def _error(expected: np.ndarray, actual: np.ndarray, least: float) -> float:
    error = float(np.linalg.norm(actual - expected) / (np.linalg.norm(expected) + least))
    return error if np.isfinite(error) else float("inf")


def last_gradient(
    program: Program, expected: Gradient, actual: Gradient, wrong: Sequence[str], tolerance: float, order: Sequence[str]
) -> Difference:
    """Return the wrong gradient that the backward pass computes first: the gradient of the module that is called last.

    Args:
        program: Program that defines which parameters are stacked.
        expected: Correct gradients.
        actual: Gradients to compare.
        wrong: Paths of the parameters whose gradients differ.
        tolerance: Largest relative error that rounding explains.
        order: Paths of the modules in the order of their calls.
    """
    calls = {layer: index for index, layer in enumerate(order)}
    total = float(np.sqrt(sum(float(np.sum(np.square(g))) for g in expected.gradients.values()))) or 1.0
    candidates: list[tuple[int, float, str, str]] = []
    for path in wrong:
        ours, theirs = (split_layers(program, path, g.gradients[path]) for g in (expected, actual))
        for index, one in ours.items():
            error = _error(one, theirs[index], SMALL * total / len(ours))
            if error > tolerance or len(ours) == 1:
                layer = find_module(path, index, calls)
                candidates.append((calls.get(layer, -1), error, layer, f"gradient of {path}"))
    _, error, layer, tensor = max(candidates)
    return Difference(layer=layer, tensor=tensor, error=error)


def split_layers(program: Program, path: str, value: Any) -> dict[str, np.ndarray]:
    """Split a stacked array into the arrays of its layers by index. Other arrays have an empty index."""
    axes, array = program.trained.axes[path], np.asarray(value)
    if STACKED not in axes:
        return {"": array}
    return {str(i): x for i, x in enumerate(np.moveaxis(array, axes.index(STACKED), 0))}


def find_module(path: str, index: str, calls: Mapping[str, int]) -> str:
    """Return the called module that owns a parameter: the one with the longest matching path.

    Args:
        path: Path of the parameter, without the index of its layer.
        index: Index of the parameter's layer, or an empty string.
        calls: Paths of the called modules.
    """
    parts = path.split(".")[:-1]
    for count in range(len(parts), 0, -1):
        for places in range(1, count + 1) if index else (0,):
            name = ".".join([*parts[:places], index, *parts[places:count]] if places else parts[:count])
            if name in calls:
                return name
    return ".".join(parts)
