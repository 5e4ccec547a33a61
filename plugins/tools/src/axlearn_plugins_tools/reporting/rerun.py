"""Run some steps of a run again, without writing anything, and record what each step computes."""

import hashlib
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.checkpoint.state import is_key
from axlearn_core.compose import compose
from axlearn_core.contracts.experiment import get_loop_config
from axlearn_core.errors import RequestError
from axlearn_core.learn.paths import flatten, unflatten
from axlearn_core.run import Run
from axlearn_core.run.lock import versions
from axlearn_core.run.record import lock_drift
from axlearn_core.train.data_facts import check_facts
from axlearn_core.train.loop import TrainLoop
from axlearn_core.train.trainer import Trainer
from axlearn_plugins_tools.reporting.step_runner import StepRunner, open_checkpoints, unwrap_loop

_PROJECTIONS = 8


class CannotRerun(Exception):
    """Raised if the steps of a run cannot be run again from the given start. The message says why."""


@attrs.frozen(eq=False)
class Sketches:
    """A few numbers per array of a model. They show whether arrays differ without keeping the arrays themselves.

    Attributes:
        paths: Path of each array.
        checksums: Checksum of the bits of each array. Two checksums differ even if only a single element differs.
        projections: Products of each array with fixed random signs.
        norms: Euclidean norm of each array.
    """

    paths: tuple[str, ...]
    checksums: np.ndarray
    projections: np.ndarray
    norms: np.ndarray

    def compare(self, other: "Sketches") -> dict[str, float]:
        """Return the arrays that differ, in the order of the model, with an estimate of the relative difference.

        The estimate is the norm of the difference divided by the norm of the larger array. It is infinite if an array is not
        finite or exists on one side only.
        """
        rows = {path: row for row, path in enumerate(other.paths)}
        result = {}
        for row, path in enumerate(self.paths):
            at = rows.get(path)
            if at is None:
                result[path] = np.inf
            elif self.checksums[row] != other.checksums[at]:
                delta = float(np.sqrt(np.mean((self.projections[row] - other.projections[at]) ** 2)))
                norm = float(max(self.norms[row], other.norms[at]))
                result[path] = delta / norm if np.isfinite(delta) and np.isfinite(norm) and norm else np.inf
        return result | dict.fromkeys((path for path in other.paths if path not in self.paths), np.inf)


@attrs.frozen(eq=False)
class StepRecord:
    """A training step.

    Attributes:
        step: Number of the step, from 1.
        scalars: Scalars of the step by name.
        batch: Hash of the batch.
        position: Files and offsets of the batch, or its index in the stream.
        arrays: Parameters and variables after the step.
    """

    step: int
    scalars: Mapping[str, float]
    batch: str
    position: str
    arrays: Sketches


@attrs.frozen(eq=False)
class Stretch:
    """Consecutive steps that were run again.

    Attributes:
        start: Number of steps before the first one.
        arrays: Parameters and variables before the first step.
        steps: The steps.
        notes: Differences between this machine and the one that trained the run.
    """

    start: int
    arrays: Sketches
    steps: Sequence[StepRecord]
    notes: tuple[str, ...] = ()


def rerun(run: Run, start: int, end: int, perturb: Mapping[str, float] | None = None) -> Stretch:
    """Run steps `start + 1` to `end` of a run again, on the devices of this process.

    Args:
        run: The run.
        start: Step of a checkpoint, or 0 for the initial state.
        end: Last step.
        perturb: Relative size of a random change to each parameter of the first state, by path. It is at least one unit of
            rounding. None leaves the parameters unchanged.

    Raises:
        CannotRerun: If the loop does more than train, or if the initial weights of the run come from elsewhere.
        RequestError: If the data changed, or if the devices do not fit the mesh of the run.
    """
    config: Any = run.config
    if not isinstance(config, Trainer.Config):
        raise RequestError(f"{run} is not a run of a trainer\n    fix: see `axlearn runs`")
    _check_loop(run, config, start)
    program = compose(config)
    with ExitStack() as closing:
        checkpointer = open_checkpoints(run, config.checkpointer)
        closing.callback(checkpointer.close)
        runner = StepRunner.open(program, checkpointer, start, closing)
        _check_data(run, runner.recorded_facts(run.lock), runner.facts)
        runner.position_data()
        if perturb is not None:
            runner = attrs.evolve(runner, state=runner.state.replace(params=_perturb(runner.state.params, perturb)))
        compiled = program.compile_trial(sketch_all)
        arrays, steps = sketch(runner.state, compiled), []
        for step in runner.run(end):
            place = f"batch {step.number} of the stream" if step.position is None else str(step.position)
            arrays_after = sketch(step.state, compiled)
            steps.append(StepRecord(step.number, step.scalars, hash_batch(step.batch), place, arrays_after))
    return Stretch(start, arrays, steps, tuple(_drift(run, program)))


def _check_loop(run: Run, config: Any, start: int) -> None:
    loop, loads_weights = unwrap_loop(get_loop_config(config))
    if loads_weights and not start:
        raise CannotRerun(f"{run} starts from the weights of another run, and has no earlier common checkpoint")
    if not isinstance(loop, TrainLoop.Config):
        raise CannotRerun(f"the loop of {run}, {type(loop).__qualname__}, does more than training steps")


def _perturb(params: Any, sizes: Mapping[str, float]) -> Any:
    """Change each floating-point parameter by a random sign times a fraction of its size, at least one unit of rounding."""
    changed = {}
    for number, (path, x) in enumerate(flatten(params).items()):
        if jnp.issubdtype(x.dtype, jnp.floating):
            size = max(float(jnp.finfo(x.dtype).eps), sizes.get(f"params.{path}", 0.0))
            signs = jax.random.rademacher(jax.random.key(number), x.shape, jnp.float32)
            changed[path] = jax.device_put((x * (1 + size * signs)).astype(x.dtype), x.sharding)
    return unflatten(params, changed)


def _check_data(run: Run, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changes = check_facts(Path(run.uri), before, now, allow_drift=True)
    if changes:
        lines = "\n".join(f"    {change}" for change in changes[:12])
        raise RequestError(
            f"the data of {run} changed, so its steps cannot be run again\n{lines}\n"
            "    fix: restore the data, or use --max-runs 0 to search the records only"
        )


def _drift(run: Run, program: Any) -> list[str]:
    devices = program.layout.mesh.devices
    now = {
        "versions": versions(),
        "python": platform.python_version(),
        "devices": f"{devices.size} x {devices.flat[0].device_kind}",
    }
    recorded = {key: run.lock[key] for key in now if key in run.lock}
    return [f"{run}: {line}" for line in (lock_drift(recorded, now) if recorded else ())]


def hash_batch(batch: Mapping[str, Any]) -> str:
    """Return a hash of the names, shapes, dtypes and values of a batch."""
    digest = hashlib.sha256()
    for name, value in sorted(batch.items()):
        array = np.ascontiguousarray(value)
        digest.update(f"{name} {array.shape} {array.dtype}\0".encode())
        digest.update(array.view(np.uint8).data if array.size else b"")
    return digest.hexdigest()[:16]


def sketch(state: Any, sketch_arrays: Callable[..., Any] | None = None) -> Sketches:
    """Return a sketch of the parameters and variables of a training state.

    Args:
        state: The training state.
        sketch_arrays: `sketch_all`, compiled (default: not compiled).
    """
    arrays = flatten({"params": state.params, "variables": state.variables})
    arrays = {p: jax.random.key_data(x) if is_key(x) else x for p, x in arrays.items()}
    checksums, numbers = jax.device_get((sketch_arrays or sketch_all)(list(arrays.values())))
    numbers = np.asarray(numbers, np.float64).reshape(len(arrays), _PROJECTIONS + 1)
    return Sketches(tuple(arrays), np.asarray(checksums), numbers[:, :-1], numbers[:, -1])


def sketch_all(arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the checksum of each array, and its projections followed by its norm."""
    sketches = [_sketch_array(x) for x in arrays]
    return [checksum for checksum, _ in sketches], [numbers for _, numbers in sketches]


def _sketch_array(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the checksum, and the projections followed by the norm."""
    hashes = _hash_positions(x.shape)
    bits = _to_bits(x)
    odd = hashes.reshape(x.shape + (1,) * (bits.ndim - x.ndim)) | 1
    checksum = jnp.sum(bits * odd, dtype=jnp.uint32)
    values = x.astype(jnp.float32)
    signs = [1 - 2 * ((hashes >> shift) & 1).astype(jnp.float32) for shift in range(8, 8 + _PROJECTIONS)]
    return checksum, jnp.stack([*(jnp.sum(values * s) for s in signs), jnp.sqrt(jnp.sum(values**2))])


def _hash_positions(shape: Sequence[int]) -> jax.Array:
    """Hash the position of each element with the finalizer of MurmurHash3."""
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        index = index * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        index = (index ^ (index >> shift)) * np.uint32(factor)
    return index ^ (index >> 16)


def _to_bits(x: jax.Array) -> jax.Array:
    """Return the bits of each element as `uint32`. 64-bit elements get an additional axis."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    info = jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo
    if info(x.dtype).bits < 8:
        x = x.astype(jnp.float32)
    width = min(x.dtype.itemsize, 4)
    return jax.lax.bitcast_convert_type(x, f"uint{8 * width}").astype(jnp.uint32)
