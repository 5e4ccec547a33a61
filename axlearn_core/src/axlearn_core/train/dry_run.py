"""Check a training request before it runs: open the data, but write nothing and compile nothing."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import jax

from axlearn_core.checkpoint.storage import check_uri
from axlearn_core.compose import ModelAndObjective, compose
from axlearn_core.compose.objective import decide_replication
from axlearn_core.compose.program import check_program
from axlearn_core.contracts.capabilities import ChecksStart, DeclaresBatches, SummarizesData
from axlearn_core.contracts.experiment import checkpoint_uri, save_interval
from axlearn_core.contracts.target import Machine
from axlearn_core.errors import StorageError, counted
from axlearn_core.plugins.decisions import Decision
from axlearn_core.plugins.request import Request
from axlearn_core.run.record import RunDir
from axlearn_core.train.api import prepare
from axlearn_core.train.objective import ObjectiveWeights
from axlearn_core.train.trackers import show_parameters
from axlearn_core.train.trainer import Trainer


@attrs.frozen
class Fact:
    """One line of a dry run's report."""

    name: str
    value: str


def dry_run(
    request: Request,
    *,
    run_dir: str | Path | None = None,
    allow_drift: bool = False,
    restore_step: int | None = None,
    restart: bool = False,
) -> list[Fact]:
    """Describe what `train` would run with these arguments.

    Returns:
        The experiment, target, mesh, parameter count, state size on each device, data, tokenizer, batch, steps, and
        checkpoints.

    Raises:
        RequestError: The request is invalid, as in `train`.
    """
    resolved, destination = prepare(request, run_dir, restore_step)
    config: Any = resolved.config
    checked = destination.check(resolved, allow_drift=allow_drift)
    program = compose(config, machine=resolved.machine)
    devices = program.layout.mesh.devices
    step = _first_step(config, checked, restore_step, restart)
    summary = check_parts(config, program.trained, new=not step)
    if not step:
        ObjectiveWeights.open(program)  # raises if a model of the objective has no weights
    shape = {axis: size for axis, size in program.layout.mesh.shape.items() if size > 1}
    facts = [
        Fact("experiment", resolved.title),
        Fact("features", ", ".join(name for name, _ in resolved.features) or "none"),
        Fact("target", f"{devices.size} x {devices.flat[0].device_kind}"),
        Fact("mesh", ", ".join(f"{axis}={size}" for axis, size in shape.items()) or "one device"),
        *(Fact(d.kind, f"{d.subject}{f' ({d.reason})' if d.reason else ''}") for d in resolved.decisions),
        *(Fact(name, text) for name, text in summary.items()),
        Fact(
            "state", f"{_state_bytes(program.state) / 2**30:.3g} GiB on each device, without gradients and activations"
        ),
    ]
    if isinstance(config.input, DeclaresBatches) and (shapes := config.input.batch_shapes()):
        facts.append(Fact("batch", ", ".join(f"{n} {list(shape)}" for n, (shape, _) in sorted(shapes.items()))))
    facts += [
        Fact("run", checked.uri or str(checked.path)),
        Fact("steps", _show_steps(step, config.max_steps)),
    ]
    if (every := save_interval(config)) is not None:
        place = checkpoint_uri(config) or checked.checkpoints
        facts.append(Fact("checkpoints", f"every {counted(every, 'step')} and at the end, in {place}"))
    return [*facts, *(Fact("note", note) for note in checked.notes)]


def check_experiment(
    config: Any, machine: Machine | None, *, opens_data: bool
) -> tuple[tuple[Decision, ...], Mapping[str, str]]:
    """Check the program of an experiment, and the data if it is trained.

    Returns:
        Decisions, and facts for the user by name.
    """
    check_uri(config)
    trained = check_program(config, machine)
    opens_data = opens_data and isinstance(config, Trainer.Config)
    return decide_replication(trained), check_parts(config, trained, new=False) if opens_data else {}


def check_parts(config: Trainer.Config, trained: ModelAndObjective, *, new: bool) -> Mapping[str, str]:
    """Open the data, the evaluators and the loop of a run as training does, and close them.

    Args:
        config: Config of the run.
        trained: Its model and objective.
        new: Also check the requirements for starting a run, which do not apply to a resumed run.

    Returns:
        Facts for the user by name: the number of parameters and, if the input knows them, the files and the tokenizer.

    Raises:
        RequestError: If training would reject the data, the tokenizer, or a part of the config.
    """
    with ExitStack() as closing:
        parts = config.open_parts(trained, closing)
        if new and isinstance(parts.loop, ChecksStart):
            parts.loop.check_start()
        counts = {"parameters": trained.model.num_parameters, "trained_parameters": parts.trained_parameters}
        data = parts.input.summarize() if isinstance(parts.input, SummarizesData) else {}
    return {"parameters": show_parameters(counts), **data}


def _first_step(config: Any, run_dir: RunDir, restore_step: int | None, restart: bool) -> int | StorageError | None:
    """Return the step of the checkpoint to resume from, None if there is none, or the error that prevents finding it."""
    if not run_dir.resumes or restart:
        return None
    try:
        with_checkpoints = config.checkpointer.build(directory=run_dir.checkpoints)
        latest = restore_step if restore_step is not None else with_checkpoints.latest_step()
        with_checkpoints.close()
    except StorageError as error:
        return error
    return latest


def _show_steps(step: int | StorageError | None, max_steps: int) -> str:
    if isinstance(step, StorageError):
        return f"unknown: {step}"
    return f"{'from step 0' if step is None else f'from step {step}, its newest checkpoint,'} to {max_steps}"


def _state_bytes(state: object) -> int:
    """Return the size of the training state on one device, in bytes."""
    total = 0
    for leaf in jax.tree.leaves(state):
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return total
