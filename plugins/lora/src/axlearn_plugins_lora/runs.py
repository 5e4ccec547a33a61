"""Adapters of whole runs: a run merged into a dense one, or its adapters exported."""

from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from axlearn_core.compose import compose
from axlearn_core.config import Node, patch
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import write
from axlearn_core.train.api import saved_config
from axlearn_core.train.run_dir import RunDir
from axlearn_plugins_lora import adapters
from axlearn_plugins_lora.feature import without_adapters


@attrs.frozen(eq=False)
class Restored:
    """A run at one of its checkpoints, on one device.

    Attributes:
        params: by path (their moving average where the run kept one).
        scales: alpha / rank of each adapted map.
        extra: what the checkpoint holds besides the state.
    """

    config: Any
    params: dict[str, Any]
    scales: dict[str, float]
    step: int
    extra: dict[str, Any]


def restored(run_dir: Path, step: int | None = None) -> Restored:
    """Reads a run. Raises `CheckpointError` where the directory is none, or has no such checkpoint."""
    config: Any = saved_config(run_dir)
    if config is None:
        raise CheckpointError(f"{run_dir} is no run directory: it has no config.yaml")
    program = compose(config, jax.devices()[:1])
    checkpointer = config.checkpointer.build(directory=run_dir / "checkpoints")
    try:
        known = checkpointer.steps()
        at = max(known, default=None) if step is None else step
        if at is None or at not in known:
            listed = ", ".join(map(str, known)) or "none"
            raise CheckpointError(f"{run_dir} has no checkpoint{f' of step {step}' if step else ''} (there: {listed})")
        state, extra = checkpointer.restore(at, program.state)
    finally:
        checkpointer.close()
    scales = adapters.scales_of(program.functional.bind(program.functional.abstract))
    return Restored(config, dict(program.steps.model_params(state)), scales, at, extra)


def export_run(run_dir: Path, directory: Path, *, step: int | None = None) -> None:
    """Writes the adapters of a run on their own; see `adapters.save`."""
    found = restored(run_dir, step)
    adapters.save(directory, found.params, found.scales)


def merge_run(run_dir: Path, out: Path, *, exported: Path | None = None, step: int | None = None) -> None:
    """Writes a run of the dense model, with the adapters in its weights, at the step and data position of `run_dir`.

    It has no optimizer state yet: its moments begin at zero.

    Args:
        run_dir: a run with adapters; with `exported`, the run that they were trained from.
        out: the new run directory, which must not hold anything.
        exported: a directory of exported adapters.
        step: which checkpoint of `run_dir`; by default the newest.

    Raises:
        RequestError: there is nothing to merge, the adapters are of another base, or `out` is taken.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RequestError(
            f"{out} is there already\n    fix: give a directory that does not exist; nothing was written"
        )
    found = restored(run_dir, step)
    params, scales = found.params, found.scales
    if exported is not None:
        if scales:
            raise RequestError(
                f"{run_dir} has adapters of its own\n    fix: give the run of their base, or leave --adapters out"
            )
        given = adapters.load(exported)
        given.check(params)
        params, scales = {**params, **given.params}, given.scales
    if not scales:
        raise RequestError(f"{run_dir} has no adapters to merge\n    fix: give a run that was trained with lora")
    write_run(out, without_adapters(found.config), adapters.merge(params, scales), found, source=run_dir)


def write_run(out: Path, config: Node[Any], params: dict[str, Any], like: Restored, *, source: Path) -> None:
    """A run directory with one checkpoint: these parameters, and a fresh state of the learner around them."""
    settings: Any = config
    if getattr(settings.checkpointer, "uri", None) is not None:  # the new run keeps its checkpoints to itself
        settings = patch(settings, {"checkpointer.uri": None})
    program = compose(settings, jax.devices()[:1])
    state = program.init(settings.seed)
    learner = state["learner"]
    if getattr(learner, "ema", None) is not None:
        learner = learner._replace(ema={p: jnp.asarray(params[p], jnp.float32) for p in learner.ema})
    state = {**state, "step": jnp.asarray(like.step, jnp.int32), "params": params, "learner": learner}
    text = write(settings, registry())
    made = RunDir(out, resumes=False)
    made.write(text, {"made_from": str(source), "step": like.step})
    checkpointer = settings.checkpointer.build(directory=made.checkpoints)
    checkpointer.files = {"config.yaml": text}
    try:
        checkpointer.save(like.step, state, extra=like.extra, metrics={})
    finally:
        checkpointer.close()
