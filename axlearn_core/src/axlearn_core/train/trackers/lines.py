"""Progress as plain lines on standard error: what a run shows where no other tracker is asked for."""

import sys
from collections.abc import Mapping
from typing import Any

from axlearn_core.config import Configurable, node
from axlearn_core.train.trackers.common import printable


class LinesTracker(Configurable):
    """A line per call, with every value. `console`, of axlearn-plugins-tools, has a bar and the remaining time."""

    @node
    class Config(Configurable.Config["LinesTracker"]):
        """Nothing to set."""

    def __init__(self, cfg: Config):
        self._max_steps = 0

    def start(self, info: Mapping[str, Any]) -> None:
        """Takes note of where the run ends."""
        self._max_steps = int(info.get("max_steps", 0))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Prints the values to four digits."""
        parts = (f"{name} {value:.4g}" for name, value in values.items())
        print(f"step {step}/{self._max_steps}", *parts, sep="  ", file=sys.stderr, flush=True)

    def text(self, step: int, name: str, value: str) -> None:
        """Prints a sample, its control characters made harmless."""
        print(f"{printable(name)} at step {step}:\n{printable(value)}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is open."""
