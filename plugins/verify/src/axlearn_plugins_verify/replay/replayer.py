"""Compute steps of a run again, with its data, keys and state."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.checkpoint.base import WEIGHTS_ONLY
from axlearn_core.compat import has_jax_started
from axlearn_core.compose import Program, compose
from axlearn_core.compose.devices import configure_devices, detect
from axlearn_core.contracts.capabilities import DescribesPosition, vocabulary_size
from axlearn_core.errors import ConfigError, InputError, RequestError, nearest
from axlearn_core.learn.paths import flatten
from axlearn_core.plugins.resolve import resolve
from axlearn_core.plugins.targets import find_machine
from axlearn_core.train.data_facts import plain_facts
from axlearn_core.train.objective import FrozenWeights
from axlearn_plugins_verify.replay import drift
from axlearn_plugins_verify.replay.history import History

HostBatch = Mapping[str, np.ndarray]


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Step:
    """A step that was computed again.

    Attributes:
        number: Number of the step, from 1.
        batch: Batch on the host.
        scalars: Scalars of the step.
        state: State after the step.
        before: State before the step. None unless it was kept.
        position: Position of the batch in the data. Its `str` is for messages.
    """

    number: int
    batch: HostBatch
    scalars: Mapping[str, float]
    state: Any
    before: Any = None
    position: Any = ""


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Replayer:
    """A run that is ready to compute steps again.

    Attributes:
        history: The run.
        program: The program that computed the step.
        batches: The data, at the position of `start`.
        state: State after `start` steps.
        start: Step of the restored checkpoint, or 0 for the initial state.
        changes: What changed since the run computed the step.
    """

    history: History
    program: Program
    batches: Any
    state: Any
    start: int
    changes: Sequence[str]

    @classmethod
    def open(
        cls, history: History, step: int, closing: ExitStack, *, allow_drift: bool = False, from_start: bool = False
    ) -> "Replayer":
        """Restore the newest checkpoint before a step, and position the data.

        Args:
            history: The run.
            step: Step to replay.
            closing: Closes the data stream.
            allow_drift: Continue if the config, the data, the versions or the code changed.
            from_start: Begin with the initial state.

        Raises:
            RequestError: The step cannot be replayed.
        """
        uri, start = str(history.run), history.start_step(step, from_start=from_start)
        lock = history.lock_of(step)
        prepare_devices(lock)
        config = history.config_of(step)
        changes = drift.config_drift(history, config, step)
        drift.check_drift(uri, step, changes, allow_drift=allow_drift)
        program = _compose(config, lock, allow_drift=allow_drift)
        changes += drift.version_drift(lock, program)
        try:
            source = config.build_input(config.input, vocabulary_size(program.functional.describe()))
        except InputError as error:
            raise InputError(
                f"step {step:,} of {uri} cannot be replayed, because its data cannot be read\n{error}"
            ) from error
        batches = source.train()
        closing.callback(batches.close)
        facts = plain_facts(source.describe())
        state, extra = _restore(history, program, start, config.seed)
        recorded = (extra.get("facts") if start else None) or lock.get("data") or {}
        changes += drift.data_drift(uri, recorded, facts)
        drift.check_drift(uri, step, changes, allow_drift=allow_drift)
        if "data" in extra:
            batches.set_state(extra["data"])
        if lock.get("hlo_fingerprint"):
            position = batches.get_state()
            changes += drift.step_drift(lock, program, program.put(next(batches)))
            batches.set_state(position)
            drift.check_drift(uri, step, changes, allow_drift=allow_drift)
        return cls(history=history, program=program, batches=batches, state=state, start=start, changes=tuple(changes))

    def run(self, last: int, *, keep: bool = False) -> Iterator[Step]:
        """Compute the steps after `start`, up to and including `last`.

        Args:
            last: Last step.
            keep: Keep a copy of the state before the last step. It needs the memory of a second state.
        """
        state = self.state
        for number in range(self.start + 1, last + 1):
            batch = next(self.batches)
            position = self._position(number)
            before = jax.tree.map(jnp.copy, state) if keep and number == last else None
            state, scalars = self.program.train_step(state, self.program.put(batch))
            values = {name: float(np.asarray(value)) for name, value in scalars.items()}
            yield Step(number=number, batch=batch, scalars=values, state=state, before=before, position=position)

    def _position(self, number: int) -> Any:
        if isinstance(self.batches, DescribesPosition):
            return self.batches.describe_position()
        return f"number {number} in the stream"


def prepare_devices(lock: Mapping[str, Any]) -> None:
    """Set up as many virtual CPU devices as the run had. Does nothing if JAX has started, or for other hardware."""
    count = str(lock.get("devices", "")).partition(" ")[0]
    if lock.get("platform") == "cpu" and count.isdigit() and not has_jax_started():
        configure_devices(find_machine(f"cpu-{count}" if int(count) > 1 else "cpu"))


def change_program(program: Program, features: Sequence[str], option: str) -> Program:
    """Compose the program of a run with additional features, which must keep the training state.

    Raises:
        RequestError: A feature cannot be applied, or it changes the arrays of the state.
    """
    config: Any = resolve(program.config, with_=list(features)).config  # type: ignore[arg-type]
    changed = compose(config, list(program.layout.mesh.devices.flat))
    expected, actual = (
        {path: (tuple(x.shape), str(x.dtype)) for path, x in flatten(p.state).items()} for p in (program, changed)
    )
    if expected == actual:
        return changed
    path = next(p for p in {**expected, **actual} if expected.get(p) != actual.get(p))
    got, required = (f"{s[path][1]} {list(s[path][0])}" if path in s else "absent" for s in (actual, expected))
    close = nearest(path, expected, limit=1) if path not in expected else ()
    raise RequestError(
        f"{option}: the feature changes the training state, so the step cannot start from the state of the run\n"
        f"    got: {path} {got}{f' (nearest in the run: {close[0]})' if close else ''}\n    expected: {required}, as in the run\n"
        "    fix: use a feature that only changes how the step is computed, such as precision:dtype=float32"
    )


def _compose(config: Any, lock: Mapping[str, Any], *, allow_drift: bool) -> Program:
    """Compose the run's program. If drift is allowed, fall back to the default mesh on other devices."""
    machine = detect().machine
    try:
        return compose(config, machine=machine)
    except ConfigError:
        device = jax.devices()[0].device_kind
        if not allow_drift or lock.get("devices") == f"{len(jax.devices())} x {device}":
            raise
        return compose(attrs.evolve(config, mesh=attrs.evolve(config.mesh, shape={})), machine=machine)


def _restore(history: History, program: Program, start: int, seed: int) -> tuple[Any, dict[str, Any]]:
    """Return the state after `start` steps, and `extra` of its checkpoint."""
    if not start:
        frozen = FrozenWeights.open(program)
        return frozen.load(program.init(seed)), {}
    state, extra = history.restore(start, program.state)
    if extra.get(WEIGHTS_ONLY):
        frozen = FrozenWeights.open(program)
        state = frozen.load(program.begin(seed, state))
    return state, extra
