"""The training loop."""

import itertools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from axlearn_core.config import Configurable, Node, node, offers, setting
from axlearn_core.contracts.capabilities import FollowsTraining
from axlearn_core.errors import WorkError
from axlearn_core.run.notices import log_message
from axlearn_core.train.session import Session, StepTimer, batch_tokens


@offers("input", "build_input")
class Loop(Protocol):
    """A training loop, which trains from the session's step to `max_steps`.

    Its constructor runs before anything is written. It may declare the arguments `input`, the trainer's input, and
    `build_input`, which builds an input from a config.
    """

    def run(self, session: Session) -> None:
        """Train until `max_steps` or until `session.should_stop()` returns True. Save checkpoints."""
        ...


class StepCheck(Protocol):
    """Computes some steps in place of the loop, to verify their results. Runs on all processes."""

    def due(self, step: int) -> bool:
        """Return True if this check computes the next step, after `step` finished steps."""
        ...

    def take_step(self, session: Session, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        """Compute the step. Return (state, scalars), as `session.program.train_step(session.state, batch)` does."""
        ...


class TrainLoop(Configurable):
    """The default training loop. It trains, logs, evaluates and saves.

    The host runs one step ahead of the devices. It fetches the scalars of a step after it has dispatched the next step.
    """

    @node
    class Config(Configurable.Config["TrainLoop"]):
        """Checks on training steps. They do not affect the updates.

        Attributes:
            max_nonfinite_steps: Maximum number of consecutive non-finite steps. One more stops the run.
            check: Computes some steps in place of the loop, to verify their results.
        """

        max_nonfinite_steps: int = setting(default=10, kind="execution", ge=0)
        check: Node[StepCheck] | None = setting(default=None, kind="execution", hide_default=True)

    def __init__(self, cfg: Config):
        self.max_nonfinite_steps = cfg.max_nonfinite_steps
        self.check = cfg.check.build() if cfg.check else None

    def run(self, session: Session) -> None:
        """See `Loop`."""
        record = _StepScalars(session, self.max_nonfinite_steps)
        with session:
            while session.step < session.max_steps and not session.should_stop():
                session.start_phase("input")
                if (batch := self._next_batch(session, record)) is None:
                    break
                # Waiting for a batch costs nothing while the devices are still computing the previous step.
                session.start_phase("step", count_as=None if record.devices_idle() else "step")
                session.compile_step(batch)
                session.events.notify("step_begins", session.step)
                session.state, scalars = self._step(session, batch)
                session.step += 1
                record.flush()
                record.hold(scalars, batch)
                session.events.notify("step_dispatched", session.step, scalars)
                if self._is_work_due(session):
                    record.flush()
                    start_time = time.perf_counter()
                    self._evaluate_and_save(session, last=False)
                    record.timer.pause(start_time)
            record.flush()
            if session.step > session.start_step:  # skip this if the run had already finished
                self._evaluate_and_save(session, last=True)

    def _step(self, session: Session, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        if self.check is not None and self.check.due(session.step):
            return self.check.take_step(session, batch)
        return session.program.train_step(session.state, batch)

    @staticmethod
    def _next_batch(session: Session, record: "_StepScalars") -> Any:
        try:
            return session.next_batch()
        except Exception:  # save the finished steps after any failure
            fails_everywhere = jax.process_count() == 1 or isinstance(session.batches, FollowsTraining)
            if session.step > session.start_step and fails_everywhere:
                record.flush()
                session.save(force=True)
                session.checkpointer.wait()
                log_message(f"the input failed; saved step {session.step}")
            raise

    @staticmethod
    def _evaluate_and_save(session: Session, *, last: bool) -> None:
        try:
            if not session.should_stop():
                session.evaluate(last=last)
        finally:  # save even if the evaluation fails
            session.save(force=last)

    @staticmethod
    def _is_work_due(session: Session) -> bool:
        if session.step >= session.max_steps:
            return False  # `run` evaluates and saves at the end
        return session.is_save_due() or any(e.due(session.step, last=False) for e in session.evaluators.values())


class _StepScalars:
    """Fetches the scalars of each step, checks them, and logs them every `log_every_steps` steps."""

    def __init__(self, session: Session, max_nonfinite: int):
        self.session, self.max_nonfinite = session, max_nonfinite
        self.timer: Any = None
        self.pending: tuple[int, dict[str, jax.Array], Mapping[str, float], int | None, Callable[[], str]] | None = None
        self.since_log = 0
        self.nonfinite = 0
        self.first = session.start_step == 0
        self.copies = session.program.layout.mesh.devices.flat[0].platform != "cpu"

    def hold(self, scalars: dict[str, jax.Array], batch: Any) -> None:
        """Store the scalars of the step that was just dispatched."""
        if self.timer is None:
            self.timer = StepTimer()
        for value in scalars.values() if self.copies else ():
            value.copy_to_host_async()  # start the copy now, so that `flush` does not wait for it
        session = self.session
        host_scalars, session.host_scalars = session.host_scalars, {}
        self.pending = (session.step, scalars, host_scalars, batch_tokens(batch), session.describe_batch())

    def devices_idle(self) -> bool:
        """Return True if no step is running on the devices."""
        # All scalars of a step become ready at once, so one is enough.
        scalars: Any = () if self.pending is None else self.pending[1].values()
        return all(value.is_ready() for value in itertools.islice(scalars, 1))

    def flush(self) -> None:
        """Wait for the pending step, then check and log its scalars."""
        if self.pending is None:
            return
        step, scalars, host_scalars, tokens, position = self.pending
        self.pending = None
        values = {k: float(np.asarray(v)) for k, v in scalars.items()}  # ten times faster than float(v) on CPUs
        values |= host_scalars
        self.session.report_step(step, values)
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
        self.session.check_local_checkpoint(step)
        if self.nonfinite > self.max_nonfinite:
            self.session.save(force=True)
            self.session.checkpointer.wait()
            raise WorkError(
                f"{self.nonfinite} consecutive steps had a non-finite {' and '.join(bad)}, the last at step "
                f"{step}; their updates were skipped, and a checkpoint was saved without them\n"
                f"    batch: {position}\n"
                "    fix: lower the learning rate, clip gradients at a smaller norm, or inspect this batch; "
                "`loop.max_nonfinite_steps` sets the limit"
            )
