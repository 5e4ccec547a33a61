"""Scalars and samples as TensorBoard event files, without TensorFlow."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axlearn_core.config import Configurable, node, setting
from axlearn_core.train.trackers import printable, writing


class TensorBoardTracker(Configurable):
    """Writes event files under `tensorboard/` of the run directory; look at them with `tensorboard --logdir RUN_DIR`.

    Scalars are grouped as `train/<name>` and `evaluation/<name>`, samples as text. On resumption, readers are told to
    drop what an earlier process logged after the restored step.
    """

    @node
    class Config(Configurable.Config["TensorBoardTracker"]):
        """flush_seconds: how long values may wait in memory before they are written out (with fsync)."""

        flush_seconds: float = setting(default=10.0, ge=0)

    def __init__(self, cfg: Config, *, run_dir: Path):
        self._directory = Path(run_dir) / "tensorboard"
        self._flush_seconds = cfg.flush_seconds
        self._writer: Any = None
        self._proto: Any = None
        self._flushed = 0.0

    def start(self, info: Mapping[str, Any]) -> None:
        """Opens a new event file that takes over after `info["start_step"]`.

        Raises:
            WorkError: it cannot be written.
        """
        # tensorboardX's own SummaryWriter writes from a thread; when the disk is full that thread dies unheard and
        # logging blocks forever. Its EventsWriter writes here and now, so that the caller gets the error.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        self._proto = event_pb2
        # Its file names have a resolution of one second: two quick starts would overwrite each other without a suffix.
        suffix = f".{time.time_ns()}.{os.getpid()}"
        with writing(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(self._directory / "events"), suffix)
        # START makes readers drop every event of that step or later that they have read so far.
        start_step = int(info.get("start_step", 0))
        self._add(start_step + 1 if start_step else 0, session_log=self._proto.SessionLog(status="START"))
        self._flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one scalar per value; values without `loss` are evaluation results."""
        from tensorboardX import summary

        group = "train" if "loss" in values else "evaluation"
        for name, value in values.items():
            self._add(step, summary=summary.scalar(f"{group}/{name}", float(value)))
        if time.monotonic() - self._flushed >= self._flush_seconds:
            self._flush()

    def text(self, step: int, name: str, value: str) -> None:
        """Writes one sample, as a Markdown code block: TensorBoard shows text as Markdown."""
        from tensorboardX import summary

        block = "\n".join("    " + line for line in printable(value).split("\n"))
        self._add(step, summary=summary.text(name, block))
        self._flush()

    def close(self) -> None:
        """Writes out what is pending."""
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
