"""Write scalars and samples as TensorBoard event files, without TensorFlow."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axlearn_core.config import Configurable, node, setting
from axlearn_core.train.trackers import printable, writing


class TensorBoardTracker(Configurable):
    """Writes event files to `tensorboard/` in the run directory.

    View them with `tensorboard --logdir RUN_DIR`. Scalars are grouped as `train/<name>` and `evaluation/<name>`.
    Samples are text. When a run resumes, readers drop the events of earlier processes after the restored step.
    """

    @node
    class Config(Configurable.Config["TensorBoardTracker"]):
        """Settings for `TensorBoardTracker`.

        Attributes:
            flush_seconds: Maximum time for which values are buffered in memory before they are written with fsync.
        """

        flush_seconds: float = setting(default=10.0, ge=0)

    def __init__(self, cfg: Config, *, run_dir: Path):
        self._directory = Path(run_dir) / "tensorboard"
        self._flush_seconds = cfg.flush_seconds
        self._writer: Any = None
        self._proto: Any = None
        self._flushed = 0.0

    def start(self, info: Mapping[str, Any]) -> None:
        """Open a new event file that replaces events after `info["start_step"]`.

        Raises:
            WorkError: If the file cannot be written.
        """
        # tensorboardX's SummaryWriter writes from a thread. If the disk is full, that thread dies silently and logging
        # blocks forever. Its EventsWriter writes synchronously, so the caller gets the error.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        self._proto = event_pb2
        # File names have a resolution of one second. The suffix keeps two quick starts from overwriting each other.
        suffix = f".{time.time_ns()}.{os.getpid()}"
        with writing(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(self._directory / "events"), suffix)
        # START makes readers drop all earlier events at or after this step.
        start_step = int(info.get("start_step", 0))
        self._add(start_step + 1 if start_step else 0, session_log=self._proto.SessionLog(status="START"))
        self._flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one scalar per value. Values without `loss` are evaluation results."""
        from tensorboardX import summary

        group = "train" if "loss" in values else "evaluation"
        for name, value in values.items():
            self._add(step, summary=summary.scalar(f"{group}/{name}", float(value)))
        if time.monotonic() - self._flushed >= self._flush_seconds:
            self._flush()

    def text(self, step: int, name: str, value: str) -> None:
        """Write one sample as a Markdown code block, because TensorBoard renders text as Markdown."""
        from tensorboardX import summary

        block = "\n".join("    " + line for line in printable(value).split("\n"))
        self._add(step, summary=summary.text(name, block))
        self._flush()

    def close(self) -> None:
        """Write buffered events and close the file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with writing(self._directory):
                writer.close()

    def _add(self, step: int, **content: Any) -> None:
        with writing(self._directory):
            self._writer.write_event(self._proto.Event(step=int(step), wall_time=time.time(), **content))

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        with writing(self._directory):
            self._writer.flush()
