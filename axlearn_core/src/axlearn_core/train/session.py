"""A running training job: everything that the loop and the evaluators work on."""

import functools
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs
import jax

from axlearn_core.checkpoint.state import agree
from axlearn_core.compose import Program
from axlearn_core.config import offers
from axlearn_core.contracts.capabilities import DescribesPosition, KeepsExecutables, KeepsLocalTier, StopsEarly
from axlearn_core.contracts.parts import BatchIterator, Checkpointer, Input
from axlearn_core.errors import AxlearnError
from axlearn_core.run.events import RunEvents
from axlearn_core.run.notices import log_message
from axlearn_core.run.record import RunDir
from axlearn_core.train.distributed import allgather_data_state
from axlearn_core.train.ownership import SAVED


class RollBack(Exception):
    """The run goes back to a checkpoint.

    Args:
        step: of the checkpoint.
    """

    def __init__(self, step: int):
        super().__init__(step)
        self.step = step


@offers("name", "input", "build_input")
class Evaluator(Protocol):
    """One entry of `evaluators`: `name` is its key there, `input` the trainer's, `build_input` builds another one.

    Its constructor checks what it can: nothing has been written or trained then.
    """

    def due(self, step: int, last: bool) -> bool:
        """Whether it runs after `step`; `last` is true at the end of the run."""
        ...

    def run(self, session: "Session") -> Mapping[str, float]:
        """Scalars for the trackers; texts go to `session.text`."""
        ...


@attrs.define(kw_only=True, eq=False, repr=False)  # a representation would fetch the state
class Session:
    """A run while it is trained: its parts, its state, and what the loop asks of them.

    The trainer opens it before anything is written. `state` is None until it is restored or initialized.

    Attributes:
        program: the compiled functions.
        state: the training state after `step` steps.
        batches: the training stream.
        events: the listeners: trackers, watchdog, profiler, clock, and the parts of jobs.
        run_dir: the run directory, checked.
        lock: the lock of the run that is continued; empty for a new one.
        run_id: of the run; its checkpoints carry it.
        begins: whether the state is not restored: the run is new, or it begins with weights alone.
        peak_flops: of all devices together for the dtype in use, in FLOP/s; None if the hardware's peak is not known.
        metrics: the latest values.
        facts: what the input said of its data (`Input.describe`), kept in each checkpoint.
        stop_signal: what asked the job to stop, once `stops` has said so.
        since: when the attempt began, in seconds of the monotonic clock.
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
    facts: Mapping[str, Any] = attrs.field(factory=dict)
    state: Any = None
    step: int = 0
    begins: bool = True
    flops_per_step: int | None = None
    metrics: dict[str, float] = attrs.field(factory=dict)
    stop_signal: int | None = None
    since: float = attrs.field(factory=time.monotonic)
    start_step: int = attrs.field(init=False)
    kept_step: int = attrs.field(init=False)
    _saved_step: int = attrs.field(init=False)
    _measured: dict[str, int] = attrs.field(init=False, factory=dict)
    _local_tier: KeepsLocalTier | None = attrs.field(init=False)
    _positions: DescribesPosition | None = attrs.field(init=False)
    _is_noted: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self.begin_at(self.step)
        # Asked once and not at each step: to compare a part with a protocol takes longer than the loop's other work.
        self._local_tier = self.checkpointer if isinstance(self.checkpointer, KeepsLocalTier) else None
        self._find_positions()

    def _find_positions(self) -> None:
        self._positions = self.batches if isinstance(self.batches, DescribesPosition) else None

    @functools.cached_property
    def _stopping(self) -> StopsEarly | None:
        """The listener that stops the run early. Ask for it once the listeners are registered."""
        return next((one for one in self.events.listeners if isinstance(one, StopsEarly)), None)

    @property
    def path(self) -> Path:
        """The run directory, or the working copy of a run at a URI."""
        return self.run_dir.path

    @property
    def uri(self) -> str | None:
        """Of a run that is kept in a storage; None for a local one."""
        return self.run_dir.uri

    def begin_at(self, step: int) -> None:
        """Sets the step that this attempt begins at."""
        self.step = self.start_step = self.kept_step = step
        self._saved_step = step or -1

    def next_batch(self) -> Any:
        """The next batch, on the devices; None if a signal ended the wait for it. Raises what the input raises."""
        batch = next(self.batches) if self._stopping is None else self._stopping.next_batch()
        return None if batch is None else self.program.put(batch)

    def first_batch(self, batch: Mapping[str, Any]) -> None:
        """Compiles the step for this batch and counts its FLOPs, once."""
        if self.flops_per_step is None:
            self.beat("compile")
            facts = self.load_step(batch)
            self.program.compile("train", batch)
            self.flops_per_step = facts.get("flops") or self.program.model_flops(batch)
            self._record_compilation(batch, facts)
            self.beat("step")

    def load_step(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Loads the compiled step of an earlier attempt, if a listener keeps it.

        Returns:
            What was known of the step when it was compiled (`flops`, `kernels`, `fingerprint`); empty if it is not loaded.
        """
        keeper = self._executables()
        return keeper.load_step(batch) if keeper else {}

    def _executables(self) -> KeepsExecutables | None:
        return next((one for one in self.events.listeners if isinstance(one, KeepsExecutables)), None)

    def _record_compilation(self, batch: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Notes kernels and fingerprint of the step in the lock, and hands a new step to the listener that keeps it."""
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
        """The model with the current parameters (their moving average if the learner keeps one)."""
        return self.program.model(self.state)

    def beat(self, phase: str, count_as: str | None = None) -> None:
        """Tells the listeners what begins now; see `RunListener.phase`."""
        self.events.phase(phase, self.step, count_as)

    def observe(self, step: int, values: Mapping[str, float]) -> None:
        """Shows the scalars of a finished step to the listeners."""
        self.events.notify("step", step, values)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Sends scalars to every tracker."""
        self.events.notify("log", step, values)

    def text(self, name: str, value: str) -> None:
        """Sends a text to every tracker."""
        self.events.notify("text", self.step, name, value)

    def evaluate(self, *, last: bool = False) -> None:
        """Runs every evaluator that is due."""
        for evaluator in self.evaluators.values():
            if evaluator.due(self.step, last):
                self.beat("evaluate")
                values = {name: float(value) for name, value in evaluator.run(self).items()}  # also of JAX's scalars
                if values:
                    self.metrics.update(values)
                    self._measured.update(dict.fromkeys(values, self.step))
                    self.log(self.step, values)

    def save(self, *, force: bool = False) -> None:
        """Starts a checkpoint of this step where one is due (or `force`)."""
        if self.step == self._saved_step:
            return
        save = self.checkpointer.save
        if force or self.checkpointer.due(self.step):
            self.beat("save")
            self._ask_to_save()
        elif self._local_tier is not None and self._local_tier.local_due(self.step):
            self.beat("save")
            save = self._local_tier.save_local
        else:
            return
        now = {k: v for k, v in self.metrics.items() if self._measured.get(k, self.step) == self.step}
        metrics = {k: v for k, v in now.items() if math.isfinite(v)}
        extra = {"data": allgather_data_state(self.batches.get_state()), "step": self.step, "facts": dict(self.facts)}
        save(self.step, self.state, extra=extra, metrics=metrics)
        if save == self.checkpointer.save:
            self.kept_step = max(self.kept_step, self._saved_step)  # it was waited for, before this one began
            self._saved_step = self.step

    def finish(self) -> None:
        """Waits for the last save."""
        self.beat("save")
        self.checkpointer.wait()
        self._ask_to_save()

    def _ask_to_save(self) -> None:
        """Raises on every process if a listener of one of them refuses the save."""
        refusal: AxlearnError | None = None
        try:
            self.events.notify("saving", self.step)
        except AxlearnError as error:
            refusal = error
        agree(refusal, refusal and refusal.__cause__, "a save was refused")
        self.note_checkpoint()

    def note_checkpoint(self) -> None:
        """Notes the first complete checkpoint in the lock. A listener calls it before it copies the lock elsewhere."""
        if self._is_noted or jax.process_index() != 0 or self.checkpointer.latest_step() is None:
            return
        self._is_noted = True
        if not self.run_dir.read_lock().get(SAVED):
            self.run_dir.write_fact(SAVED, True)

    def save_due(self) -> bool:
        """Whether a checkpoint of this step is due."""
        tier = self._local_tier
        return self.checkpointer.due(self.step) or (tier is not None and tier.local_due(self.step))

    def distrust(self, step: int) -> None:
        """Raises `RollBack` where a step that is not finite says that what was restored is not to be trusted."""
        behind = None if self._local_tier is None else self._local_tier.step_behind(step)
        if behind is not None:
            raise RollBack(behind)

    def describe_batch(self) -> Callable[[], str]:
        """Which batch was just taken, to be asked when a message about it is written: by the input, else by its number."""
        position = "" if self._positions is None else self._positions.describe_position()
        step = self.step
        return lambda: str(position) or f"number {step} of the stream"

    def raise_failure(self) -> None:
        """Raises the error that stopped the run on all processes, if there is one."""
        if self._stopping is not None:
            self._stopping.raise_failure()

    def stops(self) -> bool:
        """Whether to stop now, before `max_steps`. All processes get the same answer."""
        return self._stopping is not None and self._stopping.stops()

    def __enter__(self) -> "Session":
        if self._stopping is not None:
            self._stopping.begin()
            self._find_positions()
        return self

    def __exit__(self, *_: object) -> None:
        if self._stopping is not None:
            self._stopping.end()


class StepTimer:
    """Seconds per step between log lines, without the time that evaluation and saving took."""

    def __init__(self) -> None:
        self.last = time.perf_counter()
        self.paused = 0.0

    def lap(self, steps: int) -> float:
        """Seconds per step since the last lap."""
        now = time.perf_counter()
        seconds = (now - self.last - self.paused) / max(steps, 1)
        self.last, self.paused = now, 0.0
        return seconds

    def pause(self, since: float) -> None:
        """Takes the time since `since` out of the current lap."""
        self.paused += time.perf_counter() - since


def batch_tokens(batch: Mapping[str, Any]) -> int | None:
    """Tokens of the global batch, or None where the batch has none."""
    tokens = batch.get("tokens")
    return math.prod(tokens.shape) if tokens is not None else None
