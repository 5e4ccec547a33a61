"""Log scalars and samples to Weights & Biases. Needs the `wandb` extra."""

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
    """Logs to a Weights & Biases run. A resumed run continues it.

    The file `wandb_run_id` stores the id of the W&B run. If a run resumes from an earlier step, the later steps are
    logged again. All charts use `step` as their x axis.
    """

    @node
    class Config(Configurable.Config["WandbTracker"]):
        """Settings for `WandbTracker`.

        Attributes:
            project: W&B project.
            entity: W&B entity, or None for the default entity.
            mode: `offline` writes to the run directory, for `wandb sync`. None uses WANDB_MODE.
        """

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
                f"    fix: {_FIX}, or remove it from `trackers`"
            ) from None

    def start(self, info: Mapping[str, Any]) -> None:
        """Start a W&B run, or continue the W&B run of this run directory.

        Raises:
            RequestError: If wandb rejects the settings, for example without a login.
            WorkError: If wandb cannot start.
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
                "    fix: run `wandb login`, or set the tracker's mode to offline and run `wandb sync` later"
            ) from error
        except errors.Error as error:
            raise WorkError(f"wandb cannot start: {error}") from error
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values at `step`."""
        self._send({"step": int(step), **values})

    def text(self, step: int, name: str, value: str) -> None:
        """Log a sample as preformatted HTML."""
        page = self._wandb.Html(f"<pre>{html.escape(printable(value))}</pre>", inject=False)
        self._send({"step": int(step), name: page})

    def close(self) -> None:
        """Send pending data and finish the W&B run."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()

    def _send(self, record: dict[str, Any]) -> None:
        with writing(self._run_dir / "wandb"):
            try:
                self._run.log(record)
            except self._wandb.errors.Error as error:
                raise WorkError(f"wandb cannot log step {record['step']}: {error}") from error
