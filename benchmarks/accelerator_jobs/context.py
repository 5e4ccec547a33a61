"""What a job is given: sizes, time, and where its rows go. Imports no JAX until a device is asked for."""

import json
import math
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def clean(value: Any) -> Any:
    """A value that JSON holds: NaN and infinities become None."""
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


class Context:
    """Attributes:
    rehearsal: whether sizes are toy sizes and the device is a CPU.
    """

    def __init__(self, rows: Path, *, seconds: float, rehearsal: bool, earlier: Path | None = None):
        self.rehearsal = rehearsal
        self._rows, self._earlier = rows, earlier
        self._deadline = time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds until the harness stops this process."""
        return self._deadline - time.monotonic()

    def record(self, name: str, **figures: Any) -> None:
        """Writes one row. `skipped` gives a reason not to have measured; `error` makes the job a failed one."""
        with self._rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(clean({"name": name, **figures})) + "\n")

    def attempt(
        self, name: str, measure: Callable[[], dict[str, Any]], *, seconds: float = 0.0
    ) -> dict[str, Any] | None:
        """Records what `measure` returns, or its error: the next measurement runs in either case.

        Args:
            name: of the row.
            measure: returns the figures of the row.
            seconds: with less time left, the row is skipped.
        """
        if not self.rehearsal and self.remaining() < seconds:
            self.record(name, skipped=f"no time: {self.remaining():.0f} s left, it takes about {seconds:.0f} s")
            return None
        try:
            figures = measure()
        except Exception as error:  # the boundary of a measurement: whatever it was, the others are worth having
            traceback.print_exc()
            self.record(name, error=f"{type(error).__name__}: {error}"[:500])
            return None
        self.record(name, **figures)
        return figures

    def earlier(self, job: str) -> dict[str, dict[str, Any]]:
        """The rows of a job that ran before, by name; empty where it has none."""
        from accelerator_jobs.harness import read_rows

        rows = read_rows(self._earlier / f"{job}.jsonl")[0] if self._earlier else []
        return {row["name"]: row for row in rows}

    def device(self) -> Any:
        """The first device that JAX sees; records what it is.

        Raises:
            SystemExit: it is a CPU, and this is not a rehearsal.
        """
        import jax

        device = jax.devices()[0]
        facts = {"platform": device.platform, "kind": device.device_kind, "client": device.client.platform_version}
        self.record("device", **facts, memory_limit=(device.memory_stats() or {}).get("bytes_limit"))
        if device.platform == "cpu" and not self.rehearsal:
            raise SystemExit("JAX finds no accelerator here; `--dry-run` rehearses on a CPU")
        return device
