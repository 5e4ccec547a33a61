"""The context of a job: sizes, time, and output. Does not import JAX until a device is requested."""

import json
import math
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def clean(value: Any) -> Any:
    """Convert a value for JSON. NaN and infinities become None."""
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


class Context:
    """The context of a job.

    Attributes:
        rehearsal: Whether to use toy sizes on a CPU.
    """

    def __init__(self, rows: Path, *, seconds: float, rehearsal: bool, earlier: Path | None = None):
        self.rehearsal = rehearsal
        self._rows, self._earlier = rows, earlier
        self._deadline = time.monotonic() + seconds

    def remaining(self) -> float:
        """Return the seconds until the harness stops this process."""
        return self._deadline - time.monotonic()

    def record(self, name: str, **figures: Any) -> None:
        """Write one row.

        Args:
            skipped: Reason for skipping the measurement.
            error: Error message, which makes the job fail.
        """
        with self._rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(clean({"name": name, **figures})) + "\n")

    def attempt(
        self, name: str, measure: Callable[[], dict[str, Any]], *, seconds: float = 0.0
    ) -> dict[str, Any] | None:
        """Record the result of `measure` or its error. An error does not stop the job.

        Args:
            name: Name of the row.
            measure: Returns the figures of the row.
            seconds: Skip the row if less time is left.
        """
        if not self.rehearsal and self.remaining() < seconds:
            self.record(name, skipped=f"no time: {self.remaining():.0f} s left, it takes about {seconds:.0f} s")
            return None
        try:
            figures = measure()
        except Exception as error:  # keep the other measurements if one of them fails
            traceback.print_exc()
            self.record(name, error=f"{type(error).__name__}: {error}"[:500])
            return None
        self.record(name, **figures)
        return figures

    def earlier(self, job: str) -> dict[str, dict[str, Any]]:
        """Return the rows of an earlier job by name, or {} if there are none."""
        from accelerator_jobs.harness import read_rows

        rows = read_rows(self._earlier / f"{job}.jsonl")[0] if self._earlier else []
        return {row["name"]: row for row in rows}

    def device(self) -> Any:
        """Return the first device that JAX sees, and record its facts.

        Raises:
            SystemExit: If the device is a CPU and this is not a rehearsal.
        """
        import jax

        device = jax.devices()[0]
        facts = {"platform": device.platform, "kind": device.device_kind, "client": device.client.platform_version}
        self.record("device", **facts, memory_limit=(device.memory_stats() or {}).get("bytes_limit"))
        if device.platform == "cpu" and not self.rehearsal:
            raise SystemExit("JAX found no accelerator; use `--dry-run` to rehearse on a CPU")
        return device
