"""Compute steps of a run again, with its data, keys and state."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import jax

from axlearn_core.compat import has_jax_started
from axlearn_core.compose import Program, compose
from axlearn_core.compose.devices import configure_devices, detect
from axlearn_core.errors import ConfigError, InputError, RequestError, nearest
from axlearn_core.learn.paths import flatten
from axlearn_core.plugins.resolve import resolve
from axlearn_core.plugins.targets import find_machine
from axlearn_plugins_tools.reporting.step_runner import ComputedStep, StepRunner
from axlearn_plugins_verify.replay import drift
from axlearn_plugins_verify.replay.history import History


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Replayer:
    """A run that is ready to compute steps again.

    Attributes:
        history: The run.
        runner: The program, the state, and the data at the position of the first step.
        changes: What changed since the run computed the step.
    """

    history: History
    runner: StepRunner
    changes: Sequence[str]

    @property
    def program(self) -> Program:
        """The program that computed the step."""
        return self.runner.program

    @property
    def batches(self) -> Any:
        """The data, after the batches of the computed steps."""
        return self.runner.batches

    @property
    def start(self) -> int:
        """Step of the restored checkpoint, or 0 for the initial state."""
        return self.runner.start

    @classmethod
    def open(
        cls, history: History, step: int, closing: ExitStack, *, allow_drift: bool = False, from_start: bool = False
    ) -> "Replayer":
        """Restore the newest checkpoint before a step, and move the data to the same position.

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
            runner = StepRunner.open(program, history.checkpointer, start, closing)
        except InputError as error:
            raise InputError(
                f"step {step:,} of {uri} cannot be replayed, because its data cannot be read\n{error}"
            ) from error
        changes += drift.data_drift(uri, runner.recorded_facts(lock), runner.facts)
        drift.check_drift(uri, step, changes, allow_drift=allow_drift)
        runner.position_data()
        batches = runner.batches
        if lock.get("hlo_fingerprint"):
            position = batches.get_state()
            changes += drift.step_drift(lock, program, program.put(next(batches)))
            batches.set_state(position)
            drift.check_drift(uri, step, changes, allow_drift=allow_drift)
        return cls(history=history, runner=runner, changes=tuple(changes))

    def run(self, last: int, *, keep: bool = False) -> Iterator[ComputedStep]:
        """Compute the steps after `start`; see `StepRunner.run`."""
        for step in self.runner.run(last, keep=keep):
            position = f"number {step.number} in the stream" if step.position is None else step.position
            yield attrs.evolve(step, position=position)


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
