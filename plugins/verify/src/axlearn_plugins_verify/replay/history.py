"""Read what a run recorded about its steps: checkpoints, configs, locks, and metrics. Nothing here writes to the run."""

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.checkpoint.base import StorageCheckpointer
from axlearn_core.contracts.capabilities import LoadsInitialWeights
from axlearn_core.errors import CheckpointError, RequestError, counted
from axlearn_core.run import Run
from axlearn_core.run.checkpoints import open_checkpoint
from axlearn_core.run.record import LOCK, get_origin, parse_lock
from axlearn_core.train.loop import TrainLoop
from axlearn_core.train.trainer import Trainer
from axlearn_plugins_tools.reporting.step_runner import open_checkpoints, read_checkpoint, unwrap_loop

NOT_COMPARED = ("step", "elapsed_seconds", "step_seconds", "tokens_per_second", "mfu", "nonfinite")
"""Values of a record that measure time, or that describe the record."""


@attrs.frozen(eq=False, repr=False)
class History:
    """The history of a run.

    Attributes:
        run: The run.
        config: Config file of the run.
        checkpointer: Reads the checkpoints. It never writes.
    """

    run: Run
    config: Any
    checkpointer: Any

    @classmethod
    def open(cls, uri: str | Path) -> "History":
        """Open a run.

        Raises:
            RequestError: `uri` is not a run, or its loop takes steps that cannot be replayed.
        """
        run = Run(uri)
        config: Any = run.config
        if config is None:
            raise run.missing()
        if not isinstance(config, Trainer.Config):
            raise RequestError(
                f"{uri} is not a training run\n    got: the config of a {type(config).__qualname__}\n"
                "    expected: a Trainer.Config\n    fix: use the directory that `axlearn train` printed"
            )
        check_loop(config)
        return cls(run, config, open_checkpoints(run, config.checkpointer))

    def close(self) -> None:
        """Release the checkpointer."""
        self.checkpointer.close()

    @cached_property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return list(self.checkpointer.steps())

    @cached_property
    def scalars(self) -> dict[int, dict[str, float]]:
        """Recorded scalars by step, without timings. Includes the results of evaluators."""
        by_step: dict[int, dict[str, float]] = {}
        for record in self.run.metrics:
            nonfinite = record.get("nonfinite") or {}
            values = {k: float(v) for k, v in record.items() if isinstance(v, int | float) and k not in NOT_COMPARED}
            values |= {k: float(v) for k, v in nonfinite.items()}
            by_step.setdefault(record["step"], {}).update(values)
        return by_step

    @property
    def last_step(self) -> int:
        """Last step that a checkpoint or the metrics mention."""
        return max([0, *self.steps, *self.scalars])

    def start_step(self, step: int, *, from_start: bool) -> int:
        """Return the step to restore before `step` is computed again. 0 stands for the initial state.

        Args:
            step: Step to replay.
            from_start: Begin with the initial state, even if the run has saved checkpoints since.

        Raises:
            RequestError: The run has not reached the step, or the checkpoint before it is gone. The error names the nearest
                step that can be replayed.
        """
        limit = self.last_step + (self.config.log_every_steps if self.last_step else 1)
        if step > min(limit, self.config.max_steps):
            raise RequestError(
                f"{self.run} has not reached step {step:,}\n    got: --step {step}\n"
                f"    expected: at most {self.last_step:,}, the last recorded step\n    fix: --step {max(self.last_step, 1)}"
            )
        earlier = [s for s in self.steps if s < step]
        if earlier and not from_start:
            return earlier[-1]
        gone = [s for s in range(1, step) if self.checkpointer.due(s)] if self.last_step else []
        has_initial_state = get_origin(self.run.lock) is None and not isinstance(self.config.loop, LoadsInitialWeights)
        if not has_initial_state or (gone and not from_start):
            raise self._missing_checkpoint(step, gone, has_initial_state)
        return 0

    def _missing_checkpoint(self, step: int, gone: list[int], has_initial_state: bool) -> CheckpointError:
        listed = ", ".join(map(str, self.steps)) or "none"
        head = f"{self.run} has no checkpoint before step {step:,}"
        if gone:
            head += f": that of step {gone[-1]:,} is gone"
        fixes = []
        if self.steps:
            nearest = self.steps[0] + 1
            fixes.append(f"--step {nearest}, the nearest step that can be replayed")
        if has_initial_state:
            fixes.append(f"--from-start computes {counted(step, 'step')} from the initial state")
        return CheckpointError(
            f"{head}\n    checkpoints: {listed}\n    fix: {'; or '.join(fixes) or 'there is nothing to start from'}"
        )

    def checkpoint_after(self, step: int) -> int | None:
        """Return the first checkpoint at or after a step, or None. The attempt that wrote it computed the step."""
        return next((s for s in self.steps if s >= step), None)

    def config_of(self, step: int) -> Any:
        """Return the config that a step was computed with: the config of the next checkpoint, or else the run's config file."""
        saved = self.checkpoint_after(step)
        if saved is None or not isinstance(self.config.checkpointer, StorageCheckpointer.Config):
            return self.config
        return open_checkpoint(self.run.uri, self.run.storage, self.config, saved).config

    def lock_of(self, step: int) -> Mapping[str, Any]:
        """Return the lock of the attempt that computed a step: the lock of the next checkpoint, or else the run's lock."""
        saved = self.checkpoint_after(step)
        if saved is None or not isinstance(self.checkpointer, StorageCheckpointer):
            return self.run.lock
        if LOCK not in self.checkpointer.inspect(saved).files:
            return self.run.lock
        place = self.checkpointer.place
        path = f"{place.folder}{saved}/{LOCK}"
        return parse_lock(place.storage.read(path), f"{place.name}/{saved}/{LOCK}")

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Read the state and `extra` of a checkpoint, without changing anything in storage."""
        return read_checkpoint(self.checkpointer, step, like)


def check_loop(config: Any) -> None:
    """Raise `RequestError` if the loop of a run does not take the steps of `TrainLoop`."""
    loop, _ = unwrap_loop(config.loop)
    if not isinstance(loop, TrainLoop.Config):
        raise RequestError(
            "loop: the steps of this loop cannot be replayed\n"
            f"    got: {type(loop).__qualname__}\n    expected: train-loop, which computes each step from the state and one batch\n"
            "    fix: replay a run with the default loop"
        )


def same_scalar(one: float, other: float) -> bool:
    """Return True if two scalars are the same number, or if both are NaN."""
    return one == other or (math.isnan(one) and math.isnan(other))
