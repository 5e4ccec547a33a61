"""The training loop."""

import itertools
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from axlearn_core.config import Configurable, Node, node, offers, setting
from axlearn_core.errors import WorkError
from axlearn_core.run.notices import log_message
from axlearn_core.train.session import Session, StepTimer, batch_tokens


@offers("input", "build_input")
class Loop(Protocol):
    """Takes a session from its step to `max_steps`. It is built before anything is written.

    `input` is the trainer's; `build_input` builds another one.
    """

    def run(self, session: Session) -> None:
        """Returns when done or when `session.stops()` says so; saves what is to be kept."""
        ...


class StepCheck(Protocol):
    """Takes some steps in the place of the loop, to look at what they compute. All processes do."""

    def due(self, step: int) -> bool:
        """Whether it takes the step after `step` finished ones."""
        ...

    def take_step(self, session: Session, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        """(state, scalars) of the step, as `session.program.train_step(session.state, batch)` gives them."""
        ...


class TrainLoop(Configurable):
    """Steps, logs, evaluates and saves.

    The host stays one step ahead of the devices: the scalars of a step are fetched once the next one is on its way.
    """

    @node
    class Config(Configurable.Config["TrainLoop"]):
        """How steps are watched; nothing here changes an update.

        Attributes:
            max_nonfinite_steps: consecutive non-finite steps allowed before the run stops.
            check: takes some steps in another way, to see whether they are computed right.
        """

        max_nonfinite_steps: int = setting(default=10, kind="execution", ge=0)
        check: Node[StepCheck] | None = setting(default=None, kind="execution", hide_default=True)

    def __init__(self, cfg: Config):
        self.max_nonfinite_steps = cfg.max_nonfinite_steps
        self.check = cfg.check.build() if cfg.check else None

    def run(self, session: Session) -> None:
        """See `Loop`."""
        record = _Record(session, self.max_nonfinite_steps)
        with session:
            while session.step < session.max_steps and not session.stops():
                session.beat("input")
                if (batch := self._next_batch(session, record)) is None:
                    break
                # While the devices compute the step before, waiting for a batch costs nothing.
                session.beat("step", count_as=None if record.devices_idle() else "step")
                session.first_batch(batch)
                session.events.notify("step_begins", session.step)
                session.state, scalars = self._step(session, batch)
                session.step += 1
                record.flush()
                record.hold(scalars, batch)
                session.events.notify("step_dispatched", session.step, scalars)
                if self._anything_due(session):
                    record.flush()
                    since = time.perf_counter()
                    self._evaluate_and_save(session, last=False)
                    record.timer.pause(since)
            record.flush()
            if session.step > session.start_step:  # a run that was finished before has nothing to add
                self._evaluate_and_save(session, last=True)

    def _step(self, session: Session, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        if self.check is not None and self.check.due(session.step):
            return self.check.take_step(session, batch)
        return session.program.train_step(session.state, batch)

    @staticmethod
    def _next_batch(session: Session, record: "_Record") -> Any:
        try:
            return session.next_batch()
        except Exception:  # any failure of the input: the steps so far are saved
            if session.step > session.start_step and jax.process_count() == 1:
                record.flush()
                session.save(force=True)
                session.checkpointer.wait()
                log_message(f"the input failed; step {session.step} is saved")
            raise

    @staticmethod
    def _evaluate_and_save(session: Session, *, last: bool) -> None:
        try:
            if not session.stops():
                session.evaluate(last=last)
        finally:  # an evaluation that fails loses no training
            session.save(force=last)

    @staticmethod
    def _anything_due(session: Session) -> bool:
        if session.step >= session.max_steps:
            return False  # the end evaluates and saves by itself
        return session.save_due() or any(e.due(session.step, last=False) for e in session.evaluators.values())


class _Record:
    """Fetches the scalars of each step, watches them, and logs every so many."""

    def __init__(self, session: Session, max_nonfinite: int):
        self.session, self.max_nonfinite = session, max_nonfinite
        self.timer: Any = None
        self.held: tuple[int, dict[str, jax.Array], int | None, Callable[[], str]] | None = None
        self.since_log = 0
        self.nonfinite = 0
        self.first = session.start_step == 0
        self.copies = session.program.layout.mesh.devices.flat[0].platform != "cpu"

    def hold(self, scalars: dict[str, jax.Array], batch: Any) -> None:
        """Keeps the scalars of the step that was just started."""
        if self.timer is None:
            self.timer = StepTimer()
        for value in scalars.values() if self.copies else ():
            value.copy_to_host_async()  # queued behind the step, so that nothing waits for the way to the host
        self.held = (self.session.step, scalars, batch_tokens(batch), self.session.describe_batch())

    def devices_idle(self) -> bool:
        """Whether no step is under way on the devices."""
        # A step gives all of its scalars at once.
        scalars: Any = () if self.held is None else self.held[1].values()
        return all(value.is_ready() for value in itertools.islice(scalars, 1))

    def flush(self) -> None:
        """Waits for the held step and handles its scalars."""
        if self.held is None:
            return
        step, scalars, tokens, position = self.held
        self.held = None
        values = {k: float(np.asarray(v)) for k, v in scalars.items()}  # on CPUs a tenth of the time of float(v)
        self.session.observe(step, values)
        self.since_log += 1
        bad = [k for k in ("loss", "grad_norm") if not math.isfinite(values.get(k, 0.0))]
        self.nonfinite = self.nonfinite + 1 if bad else 0
        last = step >= self.session.max_steps
        if step % self.session.log_every_steps == 0 or last or self.first or bad:
            seconds = self.timer.lap(self.since_log)
            self.session.log(step, self._add_timings(values, seconds, tokens))
            self.since_log, self.first = 0, False
        self.session.metrics["loss"] = values["loss"]
        if bad:
            self._report(step, values, bad, position)

    def _add_timings(self, values: dict[str, float], seconds: float, tokens: int | None) -> dict[str, float]:
        logged = {"loss": values["loss"], "step_seconds": seconds}
        if tokens is not None:
            logged["tokens_per_second"] = tokens / seconds
        flops, peak = self.session.flops_per_step, self.session.peak_flops
        if flops and peak:
            logged["mfu"] = flops / seconds / peak
        return logged | {k: v for k, v in values.items() if k not in logged}

    def _report(self, step: int, values: dict[str, float], bad: list[str], describe_batch: Callable[[], str]) -> None:
        position = describe_batch()
        bad_values = ", ".join(f"{k} {values[k]}" for k in bad)
        log_message(f"step {step}: {bad_values}; the update was skipped. Batch: {position}")
        self.session.distrust(step)
        if self.nonfinite > self.max_nonfinite:
            self.session.save(force=True)
            self.session.checkpointer.wait()
            raise WorkError(
                f"{self.nonfinite} steps in a row had a {' and '.join(bad)} that is not finite, the last of them step "
                f"{step}; their updates were skipped, and the state before them is in the checkpoint\n"
                f"    batch: {position}\n"
                "    fix: lower the learning rate, clip harder, or look at the data there; "
                "`loop.max_nonfinite_steps` sets the limit"
            )
