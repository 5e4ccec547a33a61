"""Repeat a check in float64, whose result decides if rounding in float32 leaves doubt.

Layers compute some parts in float32 regardless of their dtype: softmax, norms, rotary angles, routers and the loss. They name
the dtype `jnp.float32`, which means float64 while a check is repeated, so these parts are precise, too. A failure in float64
does not count if a layer still computes in float32.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import attrs
import jax
import numpy as np
from jax.extend.core import jaxprs_in_params

from axlearn_core.compose import Program
from axlearn_core.config import patch, walk
from axlearn_core.contracts.arrays import is_array
from axlearn_plugins_verify.compat import double_precision
from axlearn_plugins_verify.prove.contract import Difference, Outcome

DOUBLE = "float64"
PARTS = ("model", "objective")
FLOATS = ("float32", "bfloat16", "float16")
ALSO_IN_FLOAT32 = "also in float32"
"""Note on a check of a config with a 16-bit dtype."""
VAGUE = 1e-4
"""Tolerance in float32 above which a check is inconclusive. The largest for 14 shipped experiments is 5.7e-5 (`gemma3-4b`)."""

_stops: ContextVar[bool] = ContextVar("stops", default=False)


class Inconclusive(Exception):
    """Rounding alone explains larger differences than `VAGUE`, so a comparison stopped before its second computation.

    Attributes:
        outcome: An outcome that does not hold. It has no error.
    """

    def __init__(self, tolerance: float, compared: str):
        super().__init__(compared)
        difference = Difference(layer="", tensor="result", error=float("nan"))
        self.outcome = Outcome(error=float("nan"), tolerance=tolerance, compared=compared, difference=difference)


@contextlib.contextmanager
def stopping_early() -> Iterator[None]:
    """Stop comparisons that float64 decides anyway. This saves compiling the second computation in float32."""
    token = _stops.set(True)
    try:
        yield
    finally:
        _stops.reset(token)


def stop_if_vague(tolerance: float, compared: str) -> None:
    """Raise `Inconclusive` if a tolerance is above `VAGUE` while comparisons stop early.

    Args:
        tolerance: Largest relative error that rounding explains.
        compared: What is compared, in one line.
    """
    if _stops.get() and tolerance > VAGUE:
        raise Inconclusive(tolerance, compared)


def repeat_if_doubtful(case: Any, outcome: Outcome, config: Any, check: Callable[[Any], Outcome]) -> Outcome:
    """Return the outcome in float64 if the one in float32 is doubtful: a failure, or a tolerance above `VAGUE`.

    Args:
        case: `axlearn_plugins_verify.prove.case.Case`.
        outcome: Outcome in float32, which need not name a layer.
        config: Config of the outcome.
        check: Checks a config.

    Returns:
        The outcome in float64. If float64 is impossible, the given outcome, with the reason in `compared`.
    """
    return outcome if outcome.holds and outcome.tolerance <= VAGUE else repeat(case, outcome, config, check)


def repeat(case: Any, outcome: Outcome, config: Any, check: Callable[[Any], Outcome]) -> Outcome:
    """Return the outcome of a check in float64, or the given one if that is impossible. See `repeat_if_doubtful`."""

    def keep(reason: str) -> Outcome:
        shown = outcome if outcome.holds else check(config)
        return attrs.evolve(shown, compared=f"{outcome.compared}; not repeated in float64: {reason}")

    try:
        with double_precision():
            precise = double_config(config)
            repeated = check(precise)
            rounds = not repeated.holds and computes_in_float32(case.program(precise), case.batch(case.seed))
    except Exception as error:  # any layer or kernel may reject float64
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return keep(reason)
    if rounds:
        return keep("a layer computes in float32")
    if repeated.holds and not _is_same_comparison(outcome.compared, repeated.compared):
        return keep("it selects other kernels")
    return attrs.evolve(repeated, compared=f"{repeated.compared}; repeated in float64")


def double_config(config: Any) -> Any:
    """Return a config whose model and objective compute in float64."""
    edits = {
        f"{part}.{path}": DOUBLE
        for part in PARTS
        if (node := getattr(config, part, None)) is not None
        for path, value in walk(node)
        if isinstance(value, str) and value in FLOATS
    }
    return patch(config, edits)


def as_double(batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return a batch with float64 instead of float32, if 64-bit arrays are enabled."""
    if not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return dict(batch)
    return {name: x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x for name, x in batch.items()}


def computes_in_float32(program: Program, batch: Mapping[str, Any]) -> bool:
    """Return whether the loss of a program in float64 has a value in float32, such as one from a layer with `np.float32`."""
    call = program.function("loss").call
    with program.tracing("loss"):
        traced = jax.make_jaxpr(lambda *args: call(*args))(program.trained.specs, as_double(batch))
    return any(
        is_array(variable.aval) and variable.aval.dtype == np.float32
        for equation in equations(traced.jaxpr)
        for variable in equation.outvars
    )


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr and of the jaxprs that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def _is_same_comparison(one: str, other: str) -> bool:
    """Return whether a description of a comparison contains all parts of another description."""
    parts, notes = other.split("; "), {ALSO_IN_FLOAT32}
    return all(
        any(p == part or p.startswith(f"{part},") for p in parts) for part in one.split("; ") if part not in notes
    )
