"""Scalars and samples to Weights & Biases (the extra `wandb`)."""

import html
import importlib
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from axlearn_core.config import Configurable, node
from axlearn_core.errors import RequestError, WorkError
from axlearn_core.train.trackers import printable, writing

_FIX = 'pip install "axlearn-plugins-tools[wandb]"'


class WandbTracker(Configurable):
    """Logs to a Weights & Biases run, which a resumed run continues; its identity is kept in `wandb_run_id`.

    Resuming from an earlier step logs the steps after it again, over the old ones: every chart's axis is `step`.
    """

    @node
    class Config(Configurable.Config["WandbTracker"]):
        """mode: `offline` keeps everything under the run directory, for `wandb sync`. None follows WANDB_MODE."""

        project: str = "axlearn"
        entity: str | None = None
        mode: Literal["online", "offline"] | None = None

    def __init__(self, cfg: Config, *, run_dir: Path):
        self._cfg, self._run_dir = cfg, Path(run_dir)
        self._run: Any = None
        try:
            self._wandb = importlib.import_module("wandb")
        except ModuleNotFoundError as error:
            if error.name != "wandb":
                raise
            raise RequestError(
                "the tracker 'wandb' needs the package wandb, which is not installed\n"
                f"    fix: {_FIX}, or take it out of `trackers`"
            ) from None

    def start(self, info: Mapping[str, Any]) -> None:
        """Starts a run, or continues the one of this run directory.

        Raises:
            RequestError: wandb refuses the settings (not logged in, for one).
            WorkError: it cannot start.
        """
        errors = self._wandb.errors
        path = self._run_dir / "wandb_run_id"
        with writing(path):
            self._run_dir.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_text(uuid.uuid4().hex)
            identity = path.read_text().strip()
        try:
            self._run = self._wandb.init(
                project=self._cfg.project,
                entity=self._cfg.entity,
                mode=self._cfg.mode,
                name=self._run_dir.resolve().name,
                dir=str(self._run_dir),
                id=identity,
                resume="allow",
                config=dict(info),
            )
        except errors.UsageError as error:
            raise RequestError(
                f"wandb refuses to start: {error}\n"
                "    fix: `wandb login`, or set the tracker's mode to offline and `wandb sync` later"
            ) from error
        except errors.Error as error:
            raise WorkError(f"wandb cannot start: {error}") from error
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the values over `step`."""
        self._send({"step": int(step), **values})

    def text(self, step: int, name: str, value: str) -> None:
        """Logs a sample as preformatted HTML."""
        page = self._wandb.Html(f"<pre>{html.escape(printable(value))}</pre>", inject=False)
        self._send({"step": int(step), name: page})

    def close(self) -> None:
        """Ends the run, sending what is pending."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()

    def _send(self, record: dict[str, Any]) -> None:
        with writing(self._run_dir / "wandb"):
            try:
                self._run.log(record)
            except self._wandb.errors.Error as error:
                raise WorkError(f"wandb cannot log step {record['step']}: {error}") from error
