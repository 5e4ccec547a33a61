"""Compile layouts with `axlearn plan` in separate processes, and cache the plans."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.contracts.target import Machine
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_plan.roofline import Roofline
from axlearn_plugins_plan.scratch import scratch_directory
from axlearn_plugins_plan.search.estimate import Host, with_host
from axlearn_plugins_plan.search.rank import RankedLayout, step_seconds

COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "axlearn-core", "axlearn-plugins-plan")
"""Distributions whose versions are part of the cache key, in addition to all installed axlearn plugins."""

FIGURES_VERSION = 2
"""Version of the numbers in a plan. Increase it to discard cached plans."""


@attrs.frozen(kw_only=True)
class CompiledLayout:
    """The plan of a layout. Bytes are per device.

    Attributes:
        fits: Whether the program fits in memory.
        bytes: Total memory.
        arguments: Memory of the training state and the batch.
        roofline: Roofline of the compiled program.
        seconds: Time of a step, from the same formula as the estimate.
        compile_seconds: Time to compile.
        cached: Whether the plan came from the cache.
        error: Why compilation failed. Empty if there is a plan.
    """

    fits: bool = False
    bytes: float = 0.0
    arguments: float = 0.0
    roofline: Roofline | None = None
    seconds: float | None = None
    compile_seconds: float = 0.0
    cached: bool = False
    error: str = ""


def request_words(request: Request) -> list[str]:
    """Convert a request to command-line arguments, without its target."""
    return attrs.evolve(request, target=None, layout=None).words


def plan_words(request: Request, row: RankedLayout) -> list[str]:
    """Return the `axlearn plan` arguments for a layout of a request."""
    return [*request_words(request), "--target", row.machine.name, *row.choice.words]


def resolved_request(request: Request, row: RankedLayout) -> Request:
    """Return the request for a layout, equivalent to `plan_words`."""
    more = Request.from_arguments(request.experiment, with_=list(row.choice.features), set=row.choice.settings)
    return attrs.evolve(
        request,
        features=(*request.features, *more.features),
        settings=(*request.settings, *more.settings),
        target=row.machine.name,
    )


def versions() -> dict[str, str]:
    """Return the versions of all distributions that affect the compiled program, by distribution name."""
    by_name = {}
    for dist in metadata.distributions():
        name = dist.metadata["Name"].lower().replace("_", "-")
        if name in COMPILERS or name.startswith("axlearn-plugins-"):
            by_name[name] = dist.version
    return dict(sorted(by_name.items()))


class Cache:
    """A directory with one JSON file per plan, named after a hash of the config, the machine and the versions."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._versions = json.dumps(versions())

    def path(self, request: Request, row: RankedLayout) -> Path:
        """Return the path of a layout's plan."""
        config = resolve(resolved_request(request, row)).to_yaml()
        text = f"{config}\n{row.machine.name}\n{self._versions}\n{FIGURES_VERSION}"
        return self.directory / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"

    def read(self, path: Path) -> Mapping[str, Any] | None:
        """Read a plan. Return None if the file is missing or damaged."""
        try:
            return json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            return None

    def write(self, path: Path, plan: Mapping[str, Any]) -> None:
        """Write a plan atomically."""
        self.directory.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(plan), "utf-8")
        part.replace(path)


def run_plan(words: Sequence[str], seconds: float) -> tuple[Mapping[str, Any] | None, str]:
    """Run `axlearn plan --json` in a subprocess.

    Args:
        words: Arguments of `axlearn plan`.
        seconds: Timeout.

    Returns:
        (plan, reason). After a timeout or an error, the plan is None and the reason describes the failure.
    """
    command = [sys.executable, "-m", "axlearn_core", "plan", *words, "--json"]
    with scratch_directory() as temporary:  # removes the files of a process that times out
        environment = _environment() | {"TMPDIR": str(temporary)}
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, timeout=max(seconds, 1.0), check=False, env=environment
            )
        except subprocess.TimeoutExpired:
            return None, TIMEOUT
    if process.returncode not in (0, 1) or not process.stdout.startswith("{"):
        lines = process.stderr.strip().splitlines()
        return None, lines[0] if lines else f"the compiler exited with code {process.returncode}"
    return json.loads(process.stdout), ""


TIMEOUT = "the budget was used up"


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}


def read_plan(plan: Mapping[str, Any], machine: Machine, host: Host, cached: bool) -> CompiledLayout:
    """Read the output of `axlearn plan --json`, and add the time of host transfers, which a plan does not include."""
    per_chip = machine.target.devices_per_chip
    total = plan["argument_bytes"] + plan["temporary_bytes"] + plan["code_bytes"]
    bound = Roofline(**{n: plan["roofline_seconds"][n] for n in ("compute", "hbm", "links", "network")})
    grouped = any(k["name"] == "grouped_matmul" for k in plan["kernels"])
    has_links = bound.links is not None
    return CompiledLayout(
        fits=plan["fits"],
        bytes=total / per_chip,
        arguments=plan["argument_bytes"] / per_chip,
        roofline=bound,
        seconds=with_host(step_seconds(machine, bound, grouped), host) if has_links else None,
        compile_seconds=plan["compile_seconds"],
        cached=cached,
    )


@attrs.define
class Clock:
    """The time budget of a search, in seconds."""

    budget: float
    started: float = attrs.field(factory=time.monotonic)
    longest: float = 0.0

    @property
    def remaining_seconds(self) -> float:
        """Seconds left. Negative after the budget is used up."""
        return self.budget - (time.monotonic() - self.started)

    @property
    def allows_another(self) -> bool:
        """True if at least as much time remains as the longest compilation so far took."""
        return self.remaining_seconds > self.longest


def compile_layouts(
    request: Request, rows: Sequence[RankedLayout], cache: Cache, clock: Clock, progress: Callable[[str], None]
) -> list[CompiledLayout]:
    """Compile layouts in parallel. For a layout that exceeds the budget, return an error instead of a plan."""

    def compile_layout(row: RankedLayout) -> CompiledLayout:
        words = plan_words(request, row)
        path = cache.path(request, row)
        plan = cache.read(path)
        cached = plan is not None
        if plan is None:
            if not clock.allows_another:
                return CompiledLayout(error=TIMEOUT)
            started = time.monotonic()
            plan, error = run_plan(words, clock.remaining_seconds)
            if plan is None:
                return CompiledLayout(error=error)
            clock.longest = max(clock.longest, time.monotonic() - started)
            cache.write(path, plan)
        result = read_plan(plan, row.machine, row.estimate.host, cached)
        verdict = "fits" if result.fits else "does not fit"
        time_text = "?" if result.seconds is None else f"{result.seconds:.3g} s"
        how = "from the cache" if cached else f"compiled in {result.compile_seconds:.0f} s"
        progress(f"{row.machine.name} {' '.join(row.choice.words) or 'as shipped'}: {time_text}, {verdict}, {how}")
        return result

    # One libtpu compilation already uses all cores.
    workers = 1 if any(r.machine.target.platform == "tpu" for r in rows) else max(1, min(4, os.cpu_count() or 1))
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(compile_layout, rows))
