"""A progress bar in the output of a notebook cell."""

import time
from typing import Any

from axlearn_core.config.html import tag, text
from axlearn_plugins_tools.reporting.durations import clock

_SECONDS = 0.25
"""Minimum time between two updates. Each one is a message to the browser."""


class NotebookBar:
    """Shows the step, a status, and the remaining time in a single output that it updates in place. It needs no widgets.

    Args:
        total: Number of steps in the run.
        completed: Number of steps before the run was resumed.
    """

    def __init__(self, total: int, completed: int):
        from IPython.display import display

        self._total, self._shown = total, time.monotonic()
        self._latest = completed, "compiling", None
        self._handle: Any = display(self._data(), raw=True, display_id=True)

    def update(self, step: int, status: str, ends_at: float | None) -> None:
        """Show a logged step. `ends_at` is the estimated end on the monotonic clock."""
        self._latest = step, status, ends_at
        if time.monotonic() - self._shown >= _SECONDS or step >= self._total:
            self._show()

    def close(self) -> None:
        """Show the last step."""
        self._show()

    def _show(self) -> None:
        self._shown = time.monotonic()
        self._handle.update(self._data(), raw=True)

    def _data(self) -> dict[str, str]:
        step, status, ends_at = self._latest
        eta = "" if ends_at is None or step >= self._total else f"  ETA {clock(ends_at - time.monotonic())}"
        line = f"step {step}/{self._total}  {status}{eta}"
        bar = f'<progress value="{step}" max="{self._total}" style="width: 100%"></progress>'
        return {"text/plain": line, "text/html": f'<div class="axlearn-bar">{bar}{tag("pre", text(line))}</div>'}
