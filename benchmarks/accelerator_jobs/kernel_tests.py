"""Part 1, second half: run the tests of the GPU plugin in the environment of the benchmark.

The tests compile kernels for described GPUs and interpret them on the CPU. They check that the kernels work with this
machine's JAX. `kernels` checks the numbers. The tests need a clone, pytest, and JAX's CUDA plugin.
"""

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from accelerator_jobs.context import Context

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/plugins/gpu"
REHEARSED = f"{TESTS}/test_choices.py"
"""Test file for a rehearsal, which is quick. `.ci/accelerator.py` runs more of them afterwards."""
OPTIONS = "--import-mode=importlib --strict-markers -m 'not slow and not exhaustive'"
"""Pytest options of the repository, without one worker process per core."""
OUTCOME = re.compile(r"\b(PASSED|FAILED|SKIPPED|ERROR|XFAIL)\b")
LINE = re.compile(r"^(?:\[gw\d+\] \[ *\d+%\] (?P<outcome>\w+) (?P<test>\S+)|(?P<name>tests/\S+) (?P<result>[A-Z]+))")


def measure(context: Context) -> None:
    """Record the numbers of passed, failed and skipped tests, and a row for each failed test."""
    folder = ROOT / TESTS
    if not folder.is_dir():
        context.record(TESTS, skipped="the tests are missing: this is not a clone")
        return
    if importlib.util.find_spec("pytest") is None:
        context.record(TESTS, skipped="pytest is not installed")
        return
    context.attempt(TESTS, lambda: _run(context), seconds=20)


def command(*, rehearsal: bool, cores: int) -> list[str]:
    """Return the command that runs the tests."""
    processes = ["-n", str(cores), "--dist", "worksteal"] if importlib.util.find_spec("xdist") else []
    processes = [] if rehearsal else processes
    files = REHEARSED if rehearsal else TESTS
    options = ["-o", f"addopts={OPTIONS}", "-v", "-rs", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", *options, *processes, files]


def _run(context: Context) -> dict[str, Any]:
    started, words = time.perf_counter(), command(rehearsal=context.rehearsal, cores=min(16, os.cpu_count() or 1))
    # Remove the settings of this job. The tests set their own.
    inherited = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION")}
    limit = None if context.rehearsal else max(10.0, context.remaining() - 5)
    late = False
    try:
        process = subprocess.run(
            words, cwd=ROOT, env=inherited, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit
        )
        code, printed = process.returncode, process.stdout
    except subprocess.TimeoutExpired as error:
        late, code, printed = True, 0, error.stdout or b""
    text = printed.decode(errors="replace")
    print(text)
    outcomes = outcomes_of(text)
    counts = Counter(outcomes.values())
    figures: dict[str, Any] = {name.lower(): counts[name] for name in ("PASSED", "FAILED", "SKIPPED")}
    figures |= {"seconds": time.perf_counter() - started, "reasons": skip_reasons(text)}
    if late:
        figures["stopped"] = f"the time limit was reached after {sum(counts.values())} tests"
    failed = [name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
    if failed:
        figures["error"] = f"{len(failed)} tests failed: {', '.join(failed)[:300]}"
    elif code not in (0, 5):
        figures["error"] = f"pytest exited with {code}: {' '.join(text.split())[-300:]}"
    return figures


def outcomes_of(text: str) -> dict[str, str]:
    """Return the outcome of each test in the output of `pytest -v`: PASSED, FAILED, SKIPPED or ERROR.

    Supports output with and without worker processes.
    """
    results = {}
    for match in filter(None, map(LINE.match, text.splitlines())):
        name, outcome = match["test"] or match["name"], match["outcome"] or match["result"]
        if OUTCOME.fullmatch(outcome):
            results[name] = outcome
    return results


def skip_reasons(text: str) -> list[str]:
    """Return the distinct reasons of skipped tests."""
    lines = (line.partition(": ")[2] for line in text.splitlines() if line.startswith("SKIPPED ["))
    return sorted({line.strip() for line in lines if line.strip()})
