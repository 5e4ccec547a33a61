"""Reading a trained run, and writing one that was made and not trained."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from axlearn_core.compose import Functional, TrainState, compose
from axlearn_core.config import Node, patch
from axlearn_core.errors import CheckpointError, RequestError, WorkError
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import write
from axlearn_core.train.api import saved_config
from axlearn_core.train.run_dir import RunDir
from axlearn_core.train.trainer import Trainer


@attrs.frozen(eq=False)
class Restored:
    """A run at one of its checkpoints, on one device.

    Attributes:
        path: the run directory.
        functional: the model as pure functions.
        state: the whole training state.
        params: by path; their moving average where the run kept one.
        step: the checkpoint's step.
        extra: what the checkpoint holds besides the state, such as the position in the data.
    """

    path: Path
    config: Any
    functional: Functional
    state: TrainState
    params: dict[str, Any]
    step: int
    extra: dict[str, Any]


def config_of(run_dir: Path) -> Trainer.Config:
    """The config of a run; raises `CheckpointError` where the directory is none."""
    config = saved_config(run_dir)
    if not isinstance(config, Trainer.Config):
        there = "its config is no trainer's" if config else "it has no config.yaml"
        raise CheckpointError(
            f"{run_dir} is no run directory: {there}\n    fix: give the directory that `axlearn train` named"
        )
    return config


def restored(run_dir: Path, step: int | None = None) -> Restored:
    """Reads a run at a step, by default the newest.

    Raises:
        CheckpointError: the directory is no run, has no such checkpoint, or the checkpoint is damaged.
    """
    config: Any = config_of(run_dir)
    program = compose(config, jax.devices()[:1])
    checkpointer = config.checkpointer.build(directory=run_dir / "checkpoints")
    try:
        known = checkpointer.steps()
        at = max(known, default=None) if step is None else step
        if at is None or at not in known:
            listed = ", ".join(map(str, known)) or "none"
            asked = "" if step is None else f" of step {step}"
            raise CheckpointError(f"{run_dir} has no checkpoint{asked} (there: {listed})\n    fix: give one of those")
        state, extra = checkpointer.restore(at, program.state)
    finally:
        checkpointer.close()
    params = dict(program.weights(state).params)
    return Restored(run_dir, config, program.functional, state, params, at, extra)


def check_new(out: Path) -> None:
    """Raises `RequestError` unless a new run can be written to `out`; to be asked before any work is done."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RequestError(
            f"{out} is there already\n    fix: give a directory that does not exist; nothing was written"
        )


LAST = ("config.yaml", "config.json")
"""What makes a directory a run, or a model."""


@contextlib.contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `out` in one piece; of one that was cut off nothing is left but the folders above.

    Where `out` is there already (empty, it may be a link or a mounted volume), what was made moves into it, last the
    file that makes it a run.

    Raises:
        WorkError: it cannot be written.
    """
    out = Path(os.path.realpath(out))
    there = out.is_dir()
    partial = (out if there else out.parent) / f".{out.name}.{os.getpid()}.partial"
    try:
        partial.mkdir(parents=True)
        yield partial
        if there:
            for part in sorted(partial.iterdir(), key=lambda p: p.name in LAST):
                part.rename(out / part.name)
        else:
            partial.rename(out)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise WorkError(f"cannot write {out}: {error.strerror or error}{where}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_checkpoint(
    directory: Path, config: Any, text: str, state: Any, *, extra: Mapping[str, Any], lock: Mapping[str, Any]
) -> None:
    """Writes what a run directory consists of: config, lock, and one checkpoint, of the step in `extra`.

    Args:
        directory: of the run.
        config: of its trainer.
        text: the config as YAML.
        state: the whole training state.
        extra: what the checkpoint holds besides, `step` in it.
        lock: of the run.

    Raises:
        WorkError: the directory cannot be written.
    """
    made = RunDir(directory, resumes=False)
    made.write(text, lock)
    checkpointer = config.checkpointer.build(directory=made.checkpoints)
    checkpointer.files = {"config.yaml": text}
    try:
        checkpointer.save(extra["step"], state, extra=extra, metrics={})
        checkpointer.wait()
    finally:
        checkpointer.close()


def write_run(
    out: Path,
    config: Node[Any],
    params: Mapping[str, Any],
    like: Restored,
    *,
    step: int | None = None,
    lock: Mapping[str, Any] | None = None,
) -> None:
    """Writes a run directory with one checkpoint: these parameters, and the state that a learner begins with.

    It appears in one piece.

    The learner's moments begin at zero, and a moving average at the parameters. The position in the data and the random
    numbers are those of the run that it was made of.

    Args:
        out: the directory, which must not hold anything.
        config: the config of the new run, a trainer's.
        params: path -> array, of its model.
        like: the run that it was made of.
        step: the step of the checkpoint; by default that of `like`.
        lock: more for the run lock.

    Raises:
        RequestError: `out` is taken, or the parameters are not those of the model.
        WorkError: the directory cannot be written.
    """
    check_new(out)
    settings: Any = config
    if getattr(settings.checkpointer, "uri", None) is not None:  # the new run keeps its checkpoints to itself
        settings = patch(settings, {"checkpointer.uri": None})
    functional = Functional.of(settings.model)
    wanted = functional.abstract
    if wrong := [p for p in wanted.keys() | params.keys() if _shape(params.get(p)) != _shape(wanted.get(p))]:
        raise RequestError(f"the parameters are not those of the new model: {', '.join(sorted(wrong)[:5])}")
    values = {p: jnp.asarray(params[p], s.dtype) for p, s in wanted.items()}
    learner = settings.learner.build(max_steps=settings.max_steps, axes=functional.axes)
    step = like.step if step is None else step
    state = like.state.replace(step=jnp.asarray(step, jnp.int32), params=values, learner=learner.init(values))
    text = write(settings, registry())
    lock = {"made_from": str(like.path), "step": like.step, **(lock or {})}
    with appearing(out) as partial:
        write_checkpoint(partial, settings, text, state, extra={**like.extra, "step": step}, lock=lock)


def _shape(array: Any) -> tuple[int, ...] | None:
    return None if array is None else tuple(array.shape)
