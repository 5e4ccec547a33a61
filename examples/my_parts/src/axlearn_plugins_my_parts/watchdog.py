"""The component `stack-dump`."""

import faulthandler
from pathlib import Path
from typing import IO

import jax

from axlearn_core.extend import Configurable, node, setting


class StackDump(Configurable):
    """Writes what every thread is doing to `<run>/stacks-RANK.txt` when a phase takes too long. The run goes on.

    The timer is faulthandler's, so that it fires also where a thread holds the interpreter's lock. A process has one of them.
    """

    @node
    class Config(Configurable.Config["StackDump"]):
        """`seconds`: the longest that a phase may take; allow for the time of compiling."""

        seconds: float = setting(default=1800.0, gt=0)

    def __init__(self, cfg: Config, *, run_dir: Path):
        self.seconds, self.path = cfg.seconds, Path(run_dir) / f"stacks-{jax.process_index()}.txt"
        self.file: IO[str] | None = None

    def start(self) -> None:
        """Starts the timer."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("a")
        self.beat("start", 0)

    def beat(self, phase: str, step: int) -> None:
        """Starts the timer anew."""
        if self.file is not None:
            faulthandler.dump_traceback_later(self.seconds, file=self.file)

    def close(self) -> None:
        """Ends the timer; removes the file if it is empty."""
        if self.file is not None:
            faulthandler.cancel_dump_traceback_later()
            self.file.close()
            self.file = None
            if self.path.exists() and not self.path.stat().st_size:
                self.path.unlink()
