"""The `slowest-steps` component."""

import heapq
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from axlearn_core.extend import Configurable, node, setting


class SlowestSteps(Configurable):
    """Writes the slowest steps to `<run>/slowest_steps-RANK.json`.

    The time of a step is the time between its start and the start of the next step. The profiler does not wait for the
    devices. The loop waits one step later, so long runs report accurate times.
    """

    @node
    class Config(Configurable.Config["SlowestSteps"]):
        """Settings for `SlowestSteps`.

        Attributes:
            count: Number of steps to report.
        """

        count: int = setting(default=10, ge=1)

    def __init__(self, cfg: Config, *, run_dir: Path):
        self.count, self.path = cfg.count, Path(run_dir) / f"slowest_steps-{jax.process_index()}.json"
        self.seconds: dict[int, float] = {}
        self.begin: float | None = None

    def before(self, step: int) -> None:
        """Record the time of the previous step."""
        now = time.perf_counter()
        if self.begin is not None:
            self.seconds[step] = now - self.begin
        self.begin = now

    def after(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Do nothing. Waiting for the step here would slow down the run."""

    def close(self) -> None:
        """Write the file, unless there were no steps."""
        if self.seconds:
            slowest = heapq.nlargest(self.count, self.seconds.items(), key=lambda item: item[1])
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps([{"step": step, "seconds": seconds} for step, seconds in slowest]))
