"""Read versions, driver, clocks and power without changing them. Does not import JAX."""

import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
from typing import Any

PACKAGES = (
    "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "optax", "orbax-checkpoint", "qwix", "tokamax",
    "numpy", "torch", "triton", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cublas", "nvidia-cublas-cu12",
    "axlearn-core", "axlearn-plugins-gpu", "axlearn-plugins-tpu",
)  # fmt: skip
FACTS = "name,driver_version,memory.total,clocks.max.sm,clocks.max.memory,power.limit,compute_cap"
SAMPLED = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "utilization.gpu")
BUSY = 50.0
"""Minimum utilization in percent of a sample under load."""

_VERSIONS = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps({"python": sys.version.split()[0], **found}))
"""


def query(fields: str) -> list[str] | None:
    """Return the fields of `nvidia-smi` for the first GPU, or None if there is no command or driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if process.returncode or not process.stdout.strip():
        return None
    return [v.strip() for v in process.stdout.splitlines()[0].split(",")]


def versions(python: str = sys.executable, environment: dict[str, str] | None = None) -> dict[str, str]:
    """Return the package versions that a job sees."""
    import json

    process = subprocess.run(
        [python, "-c", _VERSIONS, *PACKAGES], capture_output=True, text=True, env=os.environ | (environment or {})
    )
    return json.loads(process.stdout) if process.returncode == 0 else {"python": f"unknown: {process.stderr[-300:]}"}


def describe() -> dict[str, Any]:
    """Return facts about the host and its first GPU."""
    facts = query(FACTS)
    return {
        "host": f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} CPU cores",
        "gpu": dict(zip(FACTS.split(","), facts, strict=True)) if facts else None,
    }


class Sampler:
    """Samples clocks, power and temperature every second while a job runs."""

    def __init__(self, *, enabled: bool = True, period: float = 1.0):
        self._enabled, self._period = enabled, period
        self._samples: list[list[float]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Sampler":
        if self._enabled and query(",".join(SAMPLED)) is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join(30)

    def _sample(self) -> None:
        while not self._end.wait(self._period):
            values = query(",".join(SAMPLED))
            if values is not None:
                self._samples.append([_number(v) for v in values])

    def summary(self) -> dict[str, Any] | None:
        """Return the minimum, median and maximum under load by field, or None if there are no samples."""
        busy = [s for s in self._samples if s[-1] >= BUSY] or self._samples
        if not busy:
            return None
        columns = zip(SAMPLED, zip(*busy, strict=True), strict=True)
        return {f: [min(c), statistics.median(c), max(c)] for f, c in columns} | {"samples": len(busy)}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
