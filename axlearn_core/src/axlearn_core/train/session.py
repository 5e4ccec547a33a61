"""The training session: the state and services that the loop and the evaluators use."""

import functools
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import attrs
import jax

from axlearn_core.checkpoint.json_arrays import decode_arrays, encode_arrays
from axlearn_core.checkpoint.state import agree
from axlearn_core.compose import Program
from axlearn_core.config import offers
from axlearn_core.contracts.capabilities import (
    DescribesPosition,
    KeepsExecutables,
    KeepsLocalTier,
    KeepsState,
    StopsEarly,
)
from axlearn_core.contracts.parts import BatchIterator, Checkpointer, Input
from axlearn_core.errors import AxlearnError, CheckpointError
from axlearn_core.run.events import RunEvents
from axlearn_core.run.notices import log_message
from axlearn_core.run.record import RunDir
from axlearn_core.train.batch_ids import check_ids, count_rows
from axlearn_core.train.distributed import allgather_data_state
from axlearn_core.train.ownership import SAVED

R = TypeVar("R")
LOOP = "loop"
"""Key in a checkpoint's `extra` for the state of the loop."""


@runtime_checkable
class SupportsClose(Protocol):
    """An object with a `close` method."""

    def close(self) -> None:
        """Release resources."""
        ...


class RollBack(Exception):
    """Raised to roll the run back to a checkpoint.

    Args:
        step: Step of the checkpoint.
    """

    def __init__(self, step: int):
        super().__init__(step)
        self.step = step


@offers("name", "input", "build_input")
class Evaluator(Protocol):
    """An evaluator that runs during training.

    The constructor should check as much as it can, because it runs before anything is written or trained. It may declare the
    arguments `name` (the key in `evaluators`), `input` (the trainer's input), and `build_input`, which builds an input from
    a config.
    """

    def due(self, step: int, last: bool) -> bool:
        """Return True if the evaluator runs after `step`. `last` is True at the end of the run."""
        ...

    def run(self, session: "Session") -> Mapping[str, float]:
        """Evaluate. Return the scalars to log. Send text to `session.text`."""
        ...


@attrs.define(kw_only=True, eq=False, repr=False)  # a repr would fetch the state
class Session:
    """A training run in progress: its parts, its state, and the operations that the loop calls.

    The trainer opens it before anything is written. `state` is None until it is restored or initialized.

    Attributes:
        program: Compiled functions.
        state: Training state after `step` steps.
        batches: Training data stream.
        events: Listeners: trackers, watchdog, profiler, clock, and listeners from installed packages.
        run_dir: The checked run directory.
        lock: Lock of the resumed run, or empty for a new run.
        run_id: ID of the run, which its checkpoints store.
        has_new_state: False if the training state was restored. True if the run is new or starts from weights alone.
        kept_step: Step of the newest checkpoint that is known to be complete.
        peak_flops: Combined peak throughput of all devices for the dtype in use, in FLOP/s. None if it is unknown.
        metrics: Latest value of each metric.
        host_scalars: Scalars that the host computed for the next step, such as those of its rollouts. The loop logs them with the
            scalars of the step.
        data_facts: Facts about the data from `Input.describe`. Each checkpoint stores them.
        loop: The training loop, if its state belongs in checkpoints (`capabilities.KeepsState`).
        closing: Closes shared resources when the run ends.
        stop_signal: Signal that stopped the job, set once `should_stop` has returned True.
        start_time: Start time of this attempt, in seconds on the monotonic clock.
    """

    program: Program
    max_steps: int
    log_every_steps: int
    seed: int
    input: Input
    batches: BatchIterator
    evaluators: Mapping[str, Evaluator]
    checkpointer: Checkpointer
    run_dir: RunDir
    events: RunEvents = attrs.field(factory=RunEvents)
    lock: Mapping[str, Any] = attrs.field(factory=dict)
    run_id: str = ""
    peak_flops: float | None = None
    data_facts: Mapping[str, Any] = attrs.field(factory=dict)
    loop: object = None
    closing: ExitStack = attrs.field(factory=ExitStack)
    state: Any = None
    step: int = 0
    has_new_state: bool = True
    flops_per_step: int | None = None
    metrics: dict[str, float] = attrs.field(factory=dict)
    host_scalars: Mapping[str, float] = attrs.field(factory=dict)
    stop_signal: int | None = None
    start_time: float = attrs.field(factory=time.monotonic)
    start_step: int = attrs.field(init=False)
    kept_step: int = attrs.field(init=False)
    _saved_step: int = attrs.field(init=False)
    _measured: dict[str, int] = attrs.field(init=False, factory=dict)
    _local_tier: KeepsLocalTier | None = attrs.field(init=False)
    _positions: DescribesPosition | None = attrs.field(init=False)
    _has_record: bool = attrs.field(init=False, default=False)
    _resources: dict[str, Any] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.set_start_step(self.step)
        # Check once instead of at each step: a protocol check takes longer than the rest of the loop.
        self._local_tier = self.checkpointer if isinstance(self.checkpointer, KeepsLocalTier) else None
        self._find_positions()

    def _find_positions(self) -> None:
        self._positions = self.batches if isinstance(self.batches, DescribesPosition) else None

    @functools.cached_property
    def _early_stop(self) -> StopsEarly | None:
        """The listener that can stop the run early, or None. Cached, so read it only after listeners are registered."""
        return next((listener for listener in self.events.listeners if isinstance(listener, StopsEarly)), None)

    @property
    def path(self) -> Path:
        """The run directory, or the working copy of a run at a URI."""
        return self.run_dir.path

    @property
    def uri(self) -> str | None:
        """URI of the run, or None for a local run."""
        return self.run_dir.uri

    def set_start_step(self, step: int) -> None:
        """Set the step at which this attempt starts."""
        self.step = self.start_step = self.kept_step = step
        self._saved_step = step or -1

    def next_batch(self) -> Any:
        """Return the next batch on the devices, or None if a signal ended the wait. Raise the input's errors."""
        batch = next(self.batches) if self._early_stop is None else self._early_stop.next_batch()
        return None if batch is None else self.put(batch)

    def put(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Check the token IDs and labels of a batch, and convert it to global arrays on the mesh."""
        check_ids(batch, self._id_rows)
        return self.program.put(batch)

    @functools.cached_property
    def _id_rows(self) -> Mapping[str, int]:
        return count_rows(self.program)

    def compile_step(self, batch: Mapping[str, Any]) -> None:
        """Compile the step for this batch and count its FLOPs. Later calls do nothing."""
        if self.flops_per_step is None:
            self.start_phase("compile")
            facts = self.load_step(batch)
            self.program.compile("train", batch)
            self.flops_per_step = facts.get("flops") or self.program.model_flops(batch)
            self._record_compilation(batch, facts)
            self.start_phase("step")

    def load_step(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Load the compiled step of an earlier attempt, if a listener cached it.

        Returns:
            Facts about the compiled step (`flops`, `kernels`, `fingerprint`), or an empty mapping if it was not loaded.
        """
        keeper = self._executables()
        return keeper.load_step(batch) if keeper else {}

    def _executables(self) -> KeepsExecutables | None:
        return next((listener for listener in self.events.listeners if isinstance(listener, KeepsExecutables)), None)

    def _record_compilation(self, batch: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Record the step's kernels and fingerprint in the lock. Pass a new step to the listener that caches it."""
        if jax.process_index() != 0:
            return
        if not facts:
            kernels = [str(choice) for choice in self.program.choices("train")]
            facts = {"kernels": kernels, "fingerprint": self.program.fingerprint(batch)}
            if keeper := self._executables():
                keeper.keep_step(batch, {**facts, "flops": self.flops_per_step})
        self.run_dir.write_fact("kernels", facts["kernels"])
        before, now = self.run_dir.read_lock().get("hlo_fingerprint"), facts["fingerprint"]
        if before and before != now:
            log_message(f"note: the compiled step changed ({before} -> {now}); losses may differ in the last bits")
        self.run_dir.write_fact("hlo_fingerprint", now)

    def model(self) -> Any:
        """Return the model with the current parameters, or their moving average if the learner keeps one."""
        return self.program.model(self.state)

    def start_phase(self, phase: str, count_as: str | None = None) -> None:
        """Notify the listeners that a phase begins. See `RunListener.phase`."""
        self.events.phase(phase, self.step, count_as)

    def report_step(self, step: int, values: Mapping[str, float]) -> None:
        """Pass the scalars of a finished step to the listeners."""
        self.events.notify("step", step, values)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send scalars to every tracker."""
        self.events.notify("log", step, values)

    def text(self, name: str, value: str) -> None:
        """Send text to every tracker."""
        self.events.notify("text", self.step, name, value)

    def evaluate(self, *, last: bool = False) -> None:
        """Run every evaluator that is due."""
        for evaluator in self.evaluators.values():
            if evaluator.due(self.step, last):
                self.start_phase("evaluate")
                values = {name: float(value) for name, value in evaluator.run(self).items()}  # may be JAX scalars
                if values:
                    self.metrics.update(values)
                    self._measured.update(dict.fromkeys(values, self.step))
                    self.log(self.step, values)

    def save(self, *, force: bool = False) -> None:
        """Start saving a checkpoint at this step if one is due or `force` is True."""
        if self.step == self._saved_step:
            return
        save = self.checkpointer.save
        if force or self.checkpointer.due(self.step):
            self.start_phase("save")
            self._notify_save()
        elif self._local_tier is not None and self._local_tier.local_due(self.step):
            self.start_phase("save")
            save = self._local_tier.save_local
        else:
            return
        now = {k: v for k, v in self.metrics.items() if self._measured.get(k, self.step) == self.step}
        metrics = {k: v for k, v in now.items() if math.isfinite(v)}
        extra = {
            "data": allgather_data_state(self.batches.get_state()),
            "step": self.step,
            "facts": dict(self.data_facts),
        }
        if isinstance(self.loop, KeepsState):
            extra[LOOP] = allgather_data_state(encode_arrays(self.loop.get_state()))
        save(self.step, self.state, extra=extra, metrics=metrics)
        if save == self.checkpointer.save:
            self.kept_step = max(self.kept_step, self._saved_step)  # a save waits for the previous one
            self._saved_step = self.step

    def restore_loop(self, extra: Mapping[str, Any]) -> None:
        """Restore the state of the loop from the `extra` of a checkpoint, if it contains one.

        Raises:
            CheckpointError: If it contains the state of a loop, but this loop has none.
        """
        if not extra.get(LOOP):
            return
        if not isinstance(self.loop, KeepsState):
            raise CheckpointError(
                f"the checkpoint contains the state of another training loop\n    got: a {type(self.loop).__name__}\n"
                "    expected: a loop with `get_state` and `set_state`\n    fix: use the `loop` of the config that wrote it"
            )
        self.loop.set_state(decode_arrays(extra[LOOP]))

    def share(self, name: str, build: Callable[[], R]) -> R:
        """Return the resource of this run with a name. The first call builds it.

        The loop and the evaluators use it to share an engine, for example. If the resource has a `close` method, it is called when
        the run ends.

        Args:
            name: Name of the resource.
            build: Function that builds the resource.
        """
        if name not in self._resources:
            self._resources[name] = resource = build()
            if isinstance(resource, SupportsClose):
                self.closing.callback(resource.close)
        return self._resources[name]

    def finish(self) -> None:
        """Wait for the last save."""
        self.start_phase("save")
        self.checkpointer.wait()
        self._notify_save()

    def _notify_save(self) -> None:
        """Notify the listeners of a save. Raise on every process if a listener refuses it on any process."""
        refusal: AxlearnError | None = None
        try:
            self.events.notify("saving", self.step)
        except AxlearnError as error:
            refusal = error
        agree(refusal, refusal and refusal.__cause__, "a save was refused")
        self.record_checkpoint()

    def record_checkpoint(self) -> None:
        """Record in the lock that the run has a checkpoint. Listeners call this before they copy the lock elsewhere."""
        if self._has_record or jax.process_index() != 0 or self.checkpointer.latest_step() is None:
            return
        self._has_record = True
        if not self.run_dir.read_lock().get(SAVED):
            self.run_dir.write_fact(SAVED, True)

    def is_save_due(self) -> bool:
        """Return True if a checkpoint is due at this step."""
        tier = self._local_tier
        return self.checkpointer.due(self.step) or (tier is not None and tier.local_due(self.step))

    def check_local_checkpoint(self, step: int) -> None:
        """Raise `RollBack` if a non-finite step casts doubt on the restored local checkpoint."""
        behind = None if self._local_tier is None else self._local_tier.step_behind(step)
        if behind is not None:
            raise RollBack(behind)

    def describe_batch(self) -> Callable[[], str]:
        """Return a function that describes the latest batch, either as the input does or by its number.

        It is called only if a message needs the description.
        """
        position = "" if self._positions is None else self._positions.describe_position()
        step = self.step
        return lambda: str(position) or f"number {step} in the stream"

    def raise_failure(self) -> None:
        """On every process, raise the error that stopped the run, if any."""
        if self._early_stop is not None:
            self._early_stop.raise_failure()

    def should_stop(self) -> bool:
        """Return True if the run must stop now, before `max_steps`. All processes get the same answer."""
        return self._early_stop is not None and self._early_stop.should_stop()

    def __enter__(self) -> "Session":
        if self._early_stop is not None:
            self._early_stop.begin()
            self._find_positions()
        return self

    def __exit__(self, *_: object) -> None:
        if self._early_stop is not None:
            self._early_stop.end()


class StepTimer:
    """Measures seconds per step between log lines, excluding time spent on evaluation and saving."""

    def __init__(self) -> None:
        self.last = time.perf_counter()
        self.paused = 0.0

    def lap(self, steps: int) -> float:
        """Return the seconds per step since the last lap."""
        now = time.perf_counter()
        seconds = (now - self.last - self.paused) / max(steps, 1)
        self.last, self.paused = now, 0.0
        return seconds

    def pause(self, start_time: float) -> None:
        """Exclude the time since `start_time` from the current lap."""
        self.paused += time.perf_counter() - start_time


def batch_tokens(batch: Mapping[str, Any]) -> int | None:
    """Return the number of tokens in the global batch, or None if it has no `tokens`."""
    tokens = batch.get("tokens")
    return math.prod(tokens.shape) if tokens is not None else None
