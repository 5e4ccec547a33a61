"""Suite for trackers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from axlearn_core.config import Node
from axlearn_core.errors import RequestError, WorkError

INFO = {"experiment": "a/b ü", "parameters": 10, "devices": 2, "max_steps": 4, "start_step": 0, "run_dir": "runs/a"}
Read = Callable[[Path], list[tuple[int, dict[str, float]]]]


class TrackerSuite:
    """Tests that every tracker must pass.

    Attributes:
        config: Config of the tracker.
        read: Function from the run directory to (step, values) of each log call, for trackers whose files can be read.
        remote: Reason why logs do not appear in the run directory or on standard error, for example because they are sent to a
            service.
    """

    config: Node[Any]
    read: Read | None = None
    remote: str = ""

    def tracker(self, run_dir: Path) -> Any:
        """Build the tracker of a run."""
        try:
            return self.config.build(run_dir=run_dir)
        except RequestError as error:
            pytest.skip(f"needs the package or service of the tracker: {error}")

    def follow(self, run_dir: Path, *steps: int, start: int = 0) -> None:
        """Log some steps, as a run does."""
        tracker = self.tracker(run_dir)
        tracker.start({**INFO, "start_step": start})
        for step in steps:
            tracker.log(step, {"loss": 1.0 / step, "step_seconds": 0.5, "tokens_per_second": 10.0})
        tracker.close()

    def logged(self, run_dir: Path) -> list[tuple[int, float]]:
        """Read (step, loss) back."""
        assert self.read is not None
        return [(step, values["loss"]) for step, values in type(self).read(run_dir) if "loss" in values]  # type: ignore[misc]

    def test_tracker_accepts_full_run(self, tmp_path: Path, capfd: Any) -> None:
        tracker = self.tracker(tmp_path / "not" / "there" / "yet")
        tracker.start(INFO)
        tracker.log(1, {"loss": 2.0, "grad_norm": 1.0, "step_seconds": 0.1, "some new summary": 3.0})
        tracker.log(2, {"loss": float("nan"), "grad_norm": float("inf")})
        tracker.log(2, {"eval_loss": 1.5})
        tracker.text(2, "sample", "def f():\n\t\x1b[2J\x00 \ud800 ü 😀\r\n")
        tracker.close()
        tracker.close()
        assert capfd.readouterr().out == "", "standard output must stay empty; it is for results"

    def test_close_without_logs(self, tmp_path: Path) -> None:
        self.tracker(tmp_path).close()  # as in a run that fails while it is built
        tracker = self.tracker(tmp_path)
        tracker.start({})
        tracker.close()

    def test_logged_values_can_be_read(self, tmp_path: Path) -> None:
        if self.read is None:
            pytest.skip("needs a way to read the log: set `read`")
        self.follow(tmp_path, 1, 2)
        assert self.logged(tmp_path) == [(1, 1.0), (2, 0.5)]

    def test_more_steps_write_more_output(self, tmp_path: Path, capfd: Any) -> None:
        if self.remote:
            pytest.skip(f"needs a local output: {self.remote}")
        self.follow(tmp_path / "short", 1)
        short = len(capfd.readouterr().err) + _bytes_below(tmp_path / "short")
        self.follow(tmp_path / "long", *range(1, 60))
        long = len(capfd.readouterr().err) + _bytes_below(tmp_path / "long")
        assert long > short, (
            f"59 steps leave {long} bytes in the run directory and on standard error, and one step leaves {short}: "
            "logs are lost; if a service receives them, set `remote`"
        )

    def test_resumed_log_matches_uninterrupted_log(self, tmp_path: Path) -> None:
        self.follow(tmp_path / "stopped", 1, 2, 3)
        self.follow(tmp_path / "stopped", 3, 4, start=2)
        if self.read is not None:
            self.follow(tmp_path / "whole", 1, 2, 3, 4)
            assert self.logged(tmp_path / "stopped") == self.logged(tmp_path / "whole")

    def test_error_names_unwritable_directory(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        tracker = self.tracker(tmp_path / "file")
        message = ""
        try:
            tracker.start(INFO)
            tracker.log(1, {"loss": 1.0})
        except WorkError as error:
            message = str(error)
        finally:
            tracker.close()
        assert not message or str(tmp_path) in message, f"the error must name the directory: {message}"


def _bytes_below(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
