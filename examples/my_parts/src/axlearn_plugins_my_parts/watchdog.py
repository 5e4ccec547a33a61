"""The `stack-dump` component."""

import faulthandler
from pathlib import Path
from typing import IO

import jax

from axlearn_core.extend import Configurable, node, setting


class StackDump(Configurable):
    """Writes the stacks of all threads to `<run>/stacks-RANK.txt` if a phase takes too long.

    The run continues. The timer is faulthandler's, so it also fires if a thread holds the interpreter's lock. Each
    process has only one such timer.
    """

    @node
    class Config(Configurable.Config["StackDump"]):
        """Settings for `StackDump`.

        Attributes:
            seconds: Maximum time of a phase. It must be longer than the time to compile.
        """

        seconds: float = setting(default=1800.0, gt=0)

    def __init__(self, cfg: Config, *, run_dir: Path):
        self.seconds, self.path = cfg.seconds, Path(run_dir) / f"stacks-{jax.process_index()}.txt"
        self.file: IO[str] | None = None

    def start(self) -> None:
        """Start the timer."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("a")
        self.beat("start", 0)

    def beat(self, phase: str, step: int) -> None:
        """Restart the timer."""
        if self.file is not None:
            faulthandler.dump_traceback_later(self.seconds, file=self.file)

    def close(self) -> None:
        """Stop the timer, and remove the file if it is empty."""
        if self.file is not None:
            faulthandler.cancel_dump_traceback_later()
            self.file.close()
            self.file = None
            if self.path.exists() and not self.path.stat().st_size:
                self.path.unlink()
