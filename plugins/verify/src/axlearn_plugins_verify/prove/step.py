"""Compute the loss and the gradients of one training step, and compare two such computations."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.compose import ModelWeights, Program
from axlearn_core.kernels.selection import Selection
from axlearn_core.learn import without_state
from axlearn_plugins_verify.prove import trace
from axlearn_plugins_verify.prove.contract import Difference, Outcome
from axlearn_plugins_verify.prove.forward import EPSILON, QUICK, Select, compute_dtype, perturbed

FLOOR = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 1e-2, "float16": 5e-3}
"""Error of a gradient that rounding alone causes, relative to its norm."""
MOVES = 2
"""Number of random moves of the parameters that measure rounding."""
SMALL = 0.01
"""A gradient with a small norm is compared to this part of the norm of all gradients."""
STACKED = "layers"
"""Logical axis of stacked parameters."""

Gradients = Mapping[str, np.ndarray]

_compiled: "weakref.WeakKeyDictionary[Program, dict[Any, Any]]" = weakref.WeakKeyDictionary()


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
        """Return the loss and the gradients, with parameters that are moved by a random part of `perturb` of their size."""
        functions = _compiled.setdefault(self.program, {})
        if self.kernels not in functions:
            functions[self.kernels] = jax.jit(self.compute, compiler_options=QUICK)
        params = perturbed(self.weights.params, perturb, seed)
        loss, gradients = jax.device_get(
            functions[self.kernels](params, self.weights.variables, self.program.put(self.batch))
        )
        return Gradient(float(loss), {p: np.asarray(g, np.float64) for p, g in gradients.items()})

    def compute(self, params: Any, variables: Any, batch: Any) -> tuple[jax.Array, Any]:
        """Return the loss and the gradients. Traceable."""
        config: Any = self.program.config
        learner = config.learner.build(max_steps=config.max_steps, axes=self.program.trained.axes)
        with self.program.tracing("train", self.kernels):
            call = self.program.function("loss").call
            loss = without_state(lambda p, b: call(ModelWeights(p, variables), b))
            (loss, *_), gradients = learner.value_and_grad(loss, params, {}, batch, None)
        return loss, gradients

    def records(self) -> list[trace.Record]:
        """Compute the loss again and record the calls of modules."""

        def run(weights: ModelWeights, batch: Any) -> Any:
            with self.program.tracing("train", self.kernels):
                return self.program.function("loss").call(weights, batch)

        model = self.program.functional.describe()
        return trace.record_calls(model, run, self.weights, self.program.put(self.batch))[1]

    def select_record(self, value: np.ndarray) -> np.ndarray | None:
        """Select the comparable part of a recorded array, or None if it has no rows and positions."""
        shapes = {x.shape[:2] for x in self.batch.values() if x.ndim >= 2}
        return self.select(value) if value.shape[:2] in shapes else None


def compare_steps(one: Step, other: Step, *, compared: str, gradients: bool = True) -> Outcome:
    """Compare two computations of one step, and name the first layer that differs if they do.

    Args:
        one: The computation that is correct by assumption. It also measures the rounding.
        other: The computation to compare.
        compared: What is compared, in one line.
        gradients: Whether to compare gradients too.
    """
    expected, actual = one.evaluate(), other.evaluate()
    dtype = compute_dtype(one.program.config)
    moved = [one.evaluate(EPSILON[dtype], seed) for seed in range(MOVES)]
    loss_tolerance = max(FLOOR[dtype], 4 * max(loss_error(expected.loss, m.loss) for m in moved))
    tolerance = max(
        FLOOR[dtype], 4 * max(max(gradient_errors(expected.gradients, m.gradients).values()) for m in moved)
    )
    scalar, errors = loss_error(expected.loss, actual.loss), gradient_errors(expected.gradients, actual.gradients)
    worst = max(errors.values()) if gradients else 0.0
    wrong = [path for path, error in errors.items() if gradients and not error <= tolerance]
    if scalar <= loss_tolerance and not wrong:
        near = scalar / loss_tolerance > worst / tolerance
        return Outcome(
            error=scalar if near else worst, tolerance=loss_tolerance if near else tolerance, compared=compared
        )
    records = one.records()
    difference = trace.first_difference(records, other.records(), tolerance, one.select_record, other.select_record)
    facts = f"loss {actual.loss:.6g}, expected {expected.loss:.6g}"
    if difference is None and wrong:
        difference = last_gradient(one.program, expected, actual, wrong, tolerance, [r.layer for r in records])
    if difference is None:
        difference = Difference(layer="", tensor="loss", error=scalar)
    detail = "; ".join(filter(None, [difference.detail, facts]))
    failed = loss_tolerance if scalar > loss_tolerance else tolerance
    return Outcome(
        error=scalar if scalar > loss_tolerance else worst,
        tolerance=failed,
        compared=compared,
        difference=attrs.evolve(difference, detail=detail),
    )


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
    """Return the wrong gradient that the backward pass computes first: the one of the module that is called last.

    Args:
        program: Program, which knows the stacked parameters.
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
        axes = program.trained.axes[path]
        pairs = [("", expected.gradients[path], actual.gradients[path])]
        if STACKED in axes:
            axis = axes.index(STACKED)
            split = [np.moveaxis(x[path], axis, 0) for x in (expected.gradients, actual.gradients)]
            pairs = [(str(index), *pair) for index, pair in enumerate(zip(*split, strict=True))]
        for index, one, other in pairs:
            error = _error(one, other, SMALL * total / max(1, len(pairs)))
            if error > tolerance or len(pairs) == 1:
                layer = _module_of(path, index, calls)
                candidates.append((calls.get(layer, -1), error, layer, f"gradient of {path}"))
    _, error, layer, tensor = max(candidates)
    return Difference(layer=layer, tensor=tensor, error=error)


def _module_of(path: str, index: str, calls: Mapping[str, int]) -> str:
    """Return the module that was called and owns a parameter: the longest path of a call that fits."""
    parts = path.split(".")[:-1]
    for count in range(len(parts), 0, -1):
        for places in range(count + 1 if index else 1):
            name = ".".join([*parts[:places], index, *parts[places:count]] if places else parts[:count])
            if name in calls:
                return name
    return ".".join(parts)
