"""The rollouts of a run as readable files: `<run>/rollouts/step-N.jsonl`.

In a job with several processes, process P > 0 writes `step-N.process-P.jsonl`.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from axlearn_core.config import Configurable, node, setting
from axlearn_core.run.events import RunListener
from axlearn_core.train.trackers import writing
from axlearn_plugins_rl.rollout_contracts import Group
from axlearn_plugins_rl.rollout_records import file_name, read_name, write_rollouts

FOLDER = "rollouts"
"""Folder in the run directory."""


class RolloutLog(Configurable):
    """Writes the rollouts of training steps to files, one file per step and process.

    The files of step N have the rollouts that this step trains on. If a run resumes, files of later steps are deleted, because
    their steps are computed again.
    """

    @node
    class Config(Configurable.Config["RolloutLog"]):
        """What to write.

        Attributes:
            every_steps: Steps between two files. 0 writes no files.
            max_files: Maximum number of files of each process. The oldest ones are deleted.
            tokens: Whether to write the tokens of the rollouts.
            logprobs: Whether to write the log-probabilities of drawn tokens, if `tokens` are written.
        """

        every_steps: int = setting(default=1, ge=0)
        max_files: int = setting(default=200, ge=1)
        tokens: bool = True
        logprobs: bool = False

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self._folder, self._process = Path(FOLDER), 0
        self._steps: list[int] = []

    def start(self, run_dir: Path, step: int, process: int = 0) -> None:
        """Open the folder of a run that starts at a step. A run that starts at step 0 sets existing files aside.

        Process 0 does this for the files of all processes. Then the other processes call this for their own files, which still
        exist if each machine has a run directory of its own.
        """
        self._folder, self._process = run_dir / FOLDER, process
        files = {n: files if process == 0 else self._own(files) for n, files in list_steps(run_dir).items()}
        with writing(self._folder):
            if step == 0 and any(files.values()):
                aside = self._folder.with_name(f"{FOLDER}.superseded-{time.time_ns()}")
                aside.mkdir()
                for path in [path for paths in files.values() for path in paths]:
                    path.rename(aside / path.name)
                files = {}
            for later in [n for n in files if n > step]:
                for path in files.pop(later):
                    path.unlink()
        self._steps = [n for n, paths in files.items() if self._own(paths)]

    def _own(self, paths: Sequence[Path]) -> list[Path]:
        return [path for path in paths if (name := read_name(path.name)) and name[1] == self._process]

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """Write the rollouts of a step if they are due, and delete the oldest files.

        Raises:
            WorkError: The file cannot be written.
        """
        if not self.cfg.every_steps or step % self.cfg.every_steps:
            return
        path = self._path(step)
        with writing(path):
            write_rollouts(path, groups, step=step, tokens=self.cfg.tokens, logprobs=self.cfg.logprobs)
            self._steps.append(step)
            while len(self._steps) > self.cfg.max_files:
                self._path(self._steps.pop(0)).unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self._folder / file_name(step, self._process)


class WriteDuringStep(RunListener):
    """Writes the rollouts of each batch while the devices compute its step, so the step does not wait for the files.

    Args:
        log: The files.
    """

    def __init__(self, log: RolloutLog):
        self._log = log
        self._held: tuple[int, Sequence[Group]] | None = None
        self._failure: Exception | None = None

    def hold(self, step: int, groups: Sequence[Group]) -> None:
        """Keep the rollouts of a step until it is dispatched."""
        self._held = step, groups

    def step_dispatched(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Write the rollouts of the step. An error has to wait for `check`, where all processes can raise it."""
        if self._held is not None:
            (number, groups), self._held = self._held, None
            try:
                self._log.write(number, groups)
            except Exception as error:
                self._failure = error

    def check(self) -> None:
        """Raise the error of the latest write, if it failed."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure


def list_steps(run_dir: Path) -> dict[int, list[Path]]:
    """Return the files of a run by step, in ascending order. A step has a file for each process."""
    steps: dict[int, list[Path]] = {}
    names = sorted((name, path) for path in (run_dir / FOLDER).glob("step-*.jsonl") if (name := read_name(path.name)))
    for (step, _), path in names:
        steps.setdefault(step, []).append(path)
    return steps
