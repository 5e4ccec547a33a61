"""Kernels compute what their references compute."""

from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import jax
import numpy as np

from axlearn_core.compose import Program
from axlearn_core.contracts.target import Target
from axlearn_core.errors import AxlearnError
from axlearn_core.kernels import selection
from axlearn_core.kernels.selection import REFERENCE, Choice, Selection
from axlearn_plugins_verify.properties import target_kernels
from axlearn_plugins_verify.prove.contract import Outcome
from axlearn_plugins_verify.prove.double_precision import Inconclusive
from axlearn_plugins_verify.prove.forward import check_precisely
from axlearn_plugins_verify.prove.reuse import reuse
from axlearn_plugins_verify.prove.training_step import Step, compare_steps

LENGTHS = (384, 1024)
"""Row lengths to try if the rows of the shrunk config are too short for the kernels."""
ROWS = 2
"""Number of rows in the longer batches."""


class Kernels:
    """Compares a step with the config's kernels to one in which every op computes its reference.

    The kernels are those that the config selects before it is shrunk. If the rows of the shrunk config are too short for one
    of them, longer rows are compared. If the request names other hardware, the kernels of that hardware are compared op by op;
    see `target_kernels`.
    """

    summary: ClassVar[str] = "kernels give the loss and the gradients of their references"

    def skip_reason(self, case: Any) -> str | None:
        """Skip configs without a kernel that runs on this machine."""
        if (target := _other_target(case)) is not None:
            calls, missing = _target_calls(case, target)
            return (
                None
                if calls
                else "; ".join(missing) or f"every op of the config computes its reference on {target.name}"
            )
        steps, missing = self._steps(case, case.config)
        if steps:
            return None
        return "; ".join(missing) or "every op of the config computes its reference on this machine"

    def check(self, case: Any) -> Outcome:
        """Compare each step that has kernels to the references."""
        if (target := _other_target(case)) is not None:
            return self._check_target(case, target)
        return check_precisely(case, lambda config: self._check(case, config))

    def _check_target(self, case: Any, target: Target) -> Outcome:
        calls, missing = _target_calls(case, target)
        outcomes: list[Outcome] = []
        for call in calls:
            outcomes.append(target_kernels.compare_call(call, case.seed))
            if not outcomes[-1].holds:
                return outcomes[-1]
        worst = max(outcomes, key=lambda o: o.error / o.tolerance)
        return attrs.evolve(worst, compared="; ".join([*(o.compared for o in outcomes), *missing]))

    def _check(self, case: Any, config: Any) -> Outcome:
        steps, missing = self._steps(case, config)
        texts = [", ".join([f"{kernel} of {op}" for op, kernel in names]) for _, names in steps]
        compared, outcomes = "; ".join([*texts, *missing]), []
        for (step, _), text in zip(steps, texts, strict=True):
            reference = attrs.evolve(step, kernels=reference_selection(step.program))
            try:
                outcomes.append(compare_steps(reference, step, compared=text))
            except Inconclusive as reason:
                raise Inconclusive(reason.outcome.tolerance, compared) from None
            if not outcomes[-1].holds:
                return outcomes[-1]
        worst = max(outcomes, key=lambda o: o.error / o.tolerance)
        return attrs.evolve(worst, compared=compared)

    def _steps(self, case: Any, config: Any) -> tuple[list[tuple[Step, list[tuple[str, str]]]], list[str]]:
        """Return the steps to compare, each with its ops and kernels, and the reasons why other kernels are not compared."""
        program = case.program(config)
        names = original_kernels(case.original, program.platform)
        steps: list[tuple[Step, list[tuple[str, str]]]] = []
        compared: set[tuple[str, str]] = set()
        batch = case.batch(case.seed)
        for length in (None, *LENGTHS):
            rows = batch if length is None else lengthened(batch, length)
            step = Step(program=program, weights=case.weights(config), batch=rows)
            try:
                used = {(c.op.name, c.name) for c in step_choices(step) if c.name != REFERENCE} - compared
            except AxlearnError:
                continue  # the model does not accept rows of this length
            if used and (length is None or used & set(names)):
                steps.append((step, sorted(used)))
                compared |= used
            if not set(names) - compared:
                break
        missing = [f"{k} of {op} does not support the shrunk config" for op, k in names if (op, k) not in compared]
        return steps, missing


def _other_target(case: Any) -> Target | None:
    """Return the target of a case if its programs do not run on this machine's platform."""
    return None if case.target is None or case.target.platform == jax.default_backend() else case.target


def _target_calls(case: Any, target: Target) -> tuple[list[target_kernels.KernelCall], list[str]]:
    """Return the target's kernels that this machine can run, and a line for each kernel that it cannot."""
    calls, missing = target_kernels.target_calls(case.original, target)
    reasons = {call: call.unavailable_reason() for call in calls}
    lines = [f"{call.name} is not compared: it {reason}" for call, reason in reasons.items() if reason]
    return [call for call, reason in reasons.items() if reason is None], list(dict.fromkeys([*lines, *missing]))


def lengthened(batch: Any, length: int) -> dict[str, np.ndarray]:
    """Return a batch with fewer and longer rows. Each is one document, made of random positions of a given row."""
    size = max(x.shape[1] for x in batch.values() if x.ndim >= 2)
    places = np.random.default_rng(length).integers(0, size, length)
    result = {}
    for name, x in batch.items():
        if x.ndim < 2 or x.shape[1] != size:
            result[name] = x[:ROWS]
            continue
        rows = x[:ROWS, places]
        if name.endswith("positions"):
            rows = np.broadcast_to(np.arange(length, dtype=x.dtype), rows.shape).copy()
        result[name] = np.ones_like(rows) if name.endswith("segment_ids") else rows
    return result


def step_choices(step: Step) -> Sequence[Choice]:
    """Return the kernels that a step selects."""
    batch = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in step.batch.items()}

    def trace() -> Sequence[Choice]:
        kernels = Selection(platform=step.program.platform)
        with step.program.tracing("train", kernels):
            jax.eval_shape(step.compute, step.program.trained.abstract, step.program.trained.variables, batch)
        return kernels.choices

    return reuse(step.program, ("choices", *((n, x.shape) for n, x in batch.items())), trace)


def original_kernels(config: Any, platform: str) -> list[tuple[str, str]]:
    """Return the ops that do not compute their references before the config is shrunk, each with its kernel."""
    choices = target_kernels.trace_choices(config, platform)
    return list(dict.fromkeys((choice.op.name, choice.name) for choice in choices if choice.name != REFERENCE))


def reference_selection(program: Program) -> Selection:
    """Return the selection of a program in which every op computes its reference, even if the config names a kernel."""
    return reuse(
        program,
        "references",
        lambda: Selection(
            platform=program.platform,
            target=program.target.name if program.target else "",
            declared=lambda op: [selection.reference(op)],
            required=(),
        ),
    )
