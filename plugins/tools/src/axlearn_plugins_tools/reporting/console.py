"""Progress on standard error: a live bar on a terminal or in a notebook, plain lines elsewhere."""

import collections
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from axlearn_core.config import Configurable, node, setting
from axlearn_core.errors import counted
from axlearn_core.train.trackers import printable, show_parameters
from axlearn_plugins_tools.reporting.durations import clock
from axlearn_plugins_tools.reporting.notebook_bar import NotebookBar

_WINDOW = 20  # number of logged steps from which the remaining time is estimated


class ConsoleTracker(Configurable):
    """Shows the step, loss, tokens/s, model FLOPs utilization and remaining time.

    On a terminal or in a notebook, it updates one bar. Elsewhere, it prints one line per logged step. It always prints
    evaluation results and samples. It does not write to standard output. `mfu` is a fraction and is only shown if it is
    logged.
    """

    @node
    class Config(Configurable.Config["ConsoleTracker"]):
        """Settings for `ConsoleTracker`.

        Attributes:
            every_seconds: Minimum time between two plain lines. 0 prints every logged step.
            values: Names of other logged values to show, such as `grad_norm`.
        """

        every_seconds: float = setting(default=0.0, ge=0)
        values: tuple[str, ...] = setting(default=(), hide_default=True)

    def __init__(self, cfg: Config, *, console: Console | None = None):
        self._every_seconds, self._names = cfg.every_seconds, cfg.values
        self._console = console or Console(stderr=True, highlight=False)
        self._bar: _TerminalBar | NotebookBar | None = None
        self._max_steps = 0
        self._seen: collections.deque[tuple[float, int]] = collections.deque(maxlen=_WINDOW)
        self._printed = float("-inf")

    def start(self, info: Mapping[str, Any]) -> None:
        """Print a summary of the run and start the bar."""
        self._max_steps = int(info.get("max_steps", 0))
        first = int(info.get("start_step", 0))
        facts = [str(info.get("experiment", "")) or "run"]
        if "parameters" in info:
            facts.append(show_parameters(info, " parameters"))
        if "devices" in info:
            facts.append(_devices(info["devices"]))
        facts.append(f"resumes at step {first:,} of {self._max_steps:,}" if first else counted(self._max_steps, "step"))
        self._print(Text(printable(" · ".join(facts)), style="bold"))
        if self._console.is_jupyter:
            self._bar = NotebookBar(self._max_steps, first)
        elif self._console.is_terminal:
            self._bar = _TerminalBar(self._console, self._max_steps, first)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Update the bar or print a line.

        Values without `loss` are evaluation results. They are printed on a separate line.
        """
        if "loss" not in values:
            text = Text(f"{self._step(step)}  ", style="bold")
            text.append("  ".join(f"{name} {value:.4f}" for name, value in values.items()))
            self._print(text)
            return
        now = time.monotonic()
        self._seen.append((now, step))
        if self._bar is not None:
            self._bar.update(step, _status(values, self._names), self._ends_at(values))
        elif now - self._printed >= self._every_seconds or step >= self._max_steps:
            self._printed = now
            ends_at = self._ends_at(values)
            eta = "" if ends_at is None or step >= self._max_steps else f"  ETA {clock(ends_at - now)}"
            self._print(Text(f"{self._step(step)}  {_status(values, self._names)}{eta}"))

    def text(self, step: int, name: str, value: str) -> None:
        """Print a sample with its control characters escaped."""
        title, body = f"{printable(name)} at step {step:,}", printable(value).expandtabs(4)
        if self._console.is_terminal:
            self._console.print(Panel(Text(body), title=Text(title), title_align="left", border_style="dim"))
        else:
            self._print(Text(f"{title}:\n" + "\n".join(f"  | {line}" for line in body.split("\n"))))

    def close(self) -> None:
        """Stop the bar and restore the terminal."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)

    def _step(self, step: int) -> str:
        return f"step {step:>{len(str(self._max_steps))}}/{self._max_steps}"

    def _ends_at(self, values: Mapping[str, float]) -> float | None:
        """Return the estimated end time of the last step, on the monotonic clock.

        The estimate accounts for evaluations and saves between steps. Returns None if there is no estimate.
        """
        (then, first), (now, last) = self._seen[0], self._seen[-1]
        per_step = (now - then) / (last - first) if last > first else values.get("step_seconds")
        return None if per_step is None else now + per_step * (self._max_steps - last)


class _TerminalBar:
    """A bar at the bottom of a terminal."""

    def __init__(self, console: Console, total: int, completed: int):
        columns = (
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}"),
            _Remaining(table_column=Column(no_wrap=True)),
        )
        # Print the output of other code above the bar. Redirect standard output only if it is a terminal.
        self._progress = Progress(
            *columns, console=console, refresh_per_second=4, expand=True, redirect_stdout=sys.stdout.isatty()
        )
        self._progress.start()
        self._task = self._progress.add_task("", total=total, completed=completed, status="compiling", ends_at=None)

    def update(self, step: int, status: str, ends_at: float | None) -> None:
        """Show a logged step. `ends_at` is the estimated end on the monotonic clock."""
        self._progress.update(self._task, completed=step, status=status, ends_at=ends_at)

    def close(self) -> None:
        """Stop the bar and restore the terminal."""
        self._progress.stop()


class _Remaining(ProgressColumn):
    """The remaining time, which counts down between two logged steps."""

    def render(self, task: Task) -> Text:
        """Format the time until the `ends_at` field."""
        ends_at = task.fields["ends_at"]
        return Text(
            "" if ends_at is None or task.finished else f"ETA {clock(ends_at - time.monotonic())}", style="cyan"
        )


def _status(values: Mapping[str, float], names: Sequence[str] = ()) -> str:
    """Format the columns of one logged step, with constant width. `names` are additional values."""
    parts = [f"loss {values['loss']:7.4f}"]
    if "tokens_per_second" in values:
        parts.append(f"{values['tokens_per_second']:>9,.0f} tokens/s")
    elif "step_seconds" in values:
        parts.append(f"{values['step_seconds']:7.3f} s/step")
    if "mfu" in values:
        parts.append(f"MFU {100 * values['mfu']:4.1f}%")
    parts += [f"{name} {values[name]:<7.4g}" for name in names if name in values]
    return "  ".join(parts)


def _devices(devices: Any) -> str:
    return counted(devices, "device") if isinstance(devices, int) else str(devices)
