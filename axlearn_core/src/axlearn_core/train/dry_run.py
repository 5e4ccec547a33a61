"""Dry run: resolve and check a training request without writing, reading data or compiling."""

import math
from pathlib import Path
from typing import Any

import attrs
import jax

from axlearn_core.compose import compose
from axlearn_core.contracts.capabilities import DeclaresBatches
from axlearn_core.contracts.experiment import checkpoint_uri, save_interval
from axlearn_core.errors import StorageError
from axlearn_core.plugins.request import Request
from axlearn_core.run.record import RunDir
from axlearn_core.train.api import prepare


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
        The experiment, target, mesh, parameter count, state size on each device, batch, steps, and checkpoints.

    Raises:
        RequestError: The request is invalid, as in `train`.
    """
    resolved, destination = prepare(request, run_dir, restore_step)
    config: Any = resolved.config
    checked = destination.check(resolved, allow_drift=allow_drift)
    program = compose(config, machine=resolved.machine)
    devices = program.layout.mesh.devices
    shape = {axis: size for axis, size in program.layout.mesh.shape.items() if size > 1}
    facts = [
        Fact("experiment", resolved.title),
        Fact("features", ", ".join(name for name, _ in resolved.features) or "none"),
        Fact("target", f"{devices.size} x {devices.flat[0].device_kind}"),
        Fact("mesh", ", ".join(f"{axis}={size}" for axis, size in shape.items()) or "one device"),
        *(Fact(d.kind, f"{d.subject}{f' ({d.reason})' if d.reason else ''}") for d in resolved.decisions),
        Fact("parameters", f"{program.functional.num_parameters:,}"),
        Fact(
            "state", f"{_state_bytes(program.state) / 2**30:.3g} GiB on each device, without gradients and activations"
        ),
    ]
    if isinstance(config.input, DeclaresBatches) and (shapes := config.input.batch_shapes()):
        facts.append(Fact("batch", ", ".join(f"{n} {list(shape)}" for n, (shape, _) in sorted(shapes.items()))))
    facts += [
        Fact("run", checked.uri or str(checked.path)),
        Fact("steps", _steps(config, checked, restore_step, restart)),
    ]
    if (every := save_interval(config)) is not None:
        place = checkpoint_uri(config) or checked.checkpoints
        facts.append(Fact("checkpoints", f"every {every} steps and at the end, in {place}"))
    return [*facts, *(Fact("note", note) for note in checked.notes)]


def _steps(config: Any, run_dir: RunDir, restore_step: int | None, restart: bool) -> str:
    latest = None
    if run_dir.resumes and not restart:
        try:
            with_checkpoints = config.checkpointer.build(directory=run_dir.checkpoints)
            latest = restore_step if restore_step is not None else with_checkpoints.latest_step()
            with_checkpoints.close()
        except StorageError as error:
            return f"unknown: {error}"
    begin = f"from step {latest}, its newest checkpoint," if latest is not None else "from step 0"
    return f"{begin} to {config.max_steps}"


def _state_bytes(state: object) -> int:
    """Return the size of the training state on one device, in bytes."""
    total = 0
    for leaf in jax.tree.leaves(state):
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return total
