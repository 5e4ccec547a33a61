"""Part 1: compare the results and gradients of every kernel with the reference, on the cases of the kernel tests.

The reference is XLA's implementation in float32 on the same inputs. Errors are relative to the norm of each array. In a
rehearsal, kernels run in the interpreter that they declare. The cases of kernels without an interpreter are skipped
with a note.
"""

import contextlib
import functools
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerator_jobs.context import Context

TESTS = Path(__file__).resolve().parents[2] / "tests"
OPS = ("attention", "grouped_matmul", "gated_linear_unit", "rms_norm", "cross_entropy", "paged_attention")
REHEARSED_TARGET = "h100"
SECONDS = 12
"""Minimum seconds left to start a comparison. It compiles both passes of the kernel and of the reference."""


def measure(context: Context) -> None:
    """Record a row for each kernel and case."""
    device = context.device()
    sys.path.insert(0, str(TESTS))
    from accelerator_jobs.local import machine_of
    from axlearn_core.kernels import selection
    from support import gpu_op_cases

    platform = "gpu" if context.rehearsal else device.platform
    target = REHEARSED_TARGET if context.rehearsal else machine_of(device).target.name
    for op, implementation, case in _in_turn(context, gpu_op_cases, selection, platform):
        name = f"{op}/{implementation.name}/{case.name}"
        if context.rehearsal and implementation.interpreter is None:
            context.record(name, skipped="needs a GPU, because this kernel has no interpreter")
            continue
        suite = gpu_op_cases.suite_of(op, implementation.name, target, platform)
        interpreter = implementation.interpreter if context.rehearsal else None
        context.attempt(name, functools.partial(_compare, suite, case, interpreter), seconds=SECONDS)


def _in_turn(context: Context, gpu_op_cases: Any, selection: Any, platform: str) -> Iterator[Any]:
    """Return the op, kernel and case, with the first case of every kernel first.

    Each case is compiled, so time may run out. In this order, every kernel runs once before any kernel runs all of its
    cases.
    """
    columns = []
    for op in OPS:
        cases = gpu_op_cases.cases_of(op, small=context.rehearsal)
        for implementation in selection.installed(gpu_op_cases.OPS[op]):
            if platform in implementation.platforms:
                interpreted = context.rehearsal and implementation.interpreter is not None
                tried = cases[:1] if interpreted else cases  # the interpreter takes seconds per case
                columns.append([(op, implementation, case) for case in tried])
    for row in itertools.zip_longest(*columns):
        yield from (entry for entry in row if entry is not None)


def _compare(suite: Any, case: Any, interpreter: str | None) -> dict[str, Any]:
    """Return the errors of results and gradients, and whether both are within the test's tolerance."""
    from axlearn_core.plugins.targets import load
    from support import gpu_op_cases

    started = time.perf_counter()
    interpret: Any = contextlib.nullcontext if interpreter is None else load(interpreter)
    with interpret():
        reason = suite.refusal(case)
        if reason is not None:
            return {"refused": reason}
        results, gradients = suite.measured(case)
    expected, expected_gradients = suite.reference(case)
    forward = gpu_op_cases.relative_error(results, expected)
    backward = gpu_op_cases.relative_error(gradients, expected_gradients)
    figures = {"forward_error": forward, "backward_error": backward, "tolerance": case.tolerance}
    figures |= {"seconds": time.perf_counter() - started, "interpreted": interpreter is not None}
    # Comparisons with NaN are False.
    if not all(error is None or error <= case.tolerance for error in (forward, backward)):
        figures["error"] = f"results differ by {forward}, gradients by {backward}; expected at most {case.tolerance}"
    return figures
