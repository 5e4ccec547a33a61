"""The end of a run before `max_steps`: by a signal, by a preemption, or because the input of one process failed."""

import signal
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from axlearn_core.errors import InputError
from axlearn_core.run.events import RunListener
from axlearn_core.run.notices import log_message
from axlearn_plugins_runtime.job.input_failure import LookAhead, StopAgreement
from axlearn_plugins_runtime.job.signals import InputWaitEnded, StopSignals


class Stops(RunListener):
    """Stops a run that is asked to, at the same step on every process; see `axlearn_core.contracts.capabilities.StopsEarly`.

    Args:
        session: the run.
    """

    errors_name_plugin = False

    def __init__(self, session: Any):
        self.session = session
        # One of several processes that stops waiting would leave the others waiting for it.
        self._signals = StopSignals(_announce_stop, ends_input=jax.process_count() == 1)
        self._agreement: StopAgreement | None = None

    def begin(self) -> None:
        """Handles signals, and reads batches ahead if the job has several processes."""
        # In a job of several processes SIGTERM belongs to JAX, which tells the others; see `preempted`.
        if jax.process_count() > 1:
            run = self.session
            self._agreement = StopAgreement(run.step)
            run.batches = LookAhead(run.batches, run.max_steps - run.step, self._stop_all)
        self._signals.install(*((signal.SIGINT,) if jax.process_count() > 1 else (signal.SIGINT, signal.SIGTERM)))

    def end(self) -> None:
        """Puts back the signal handlers of before."""
        if self._agreement is not None:
            self._agreement.close()
        self._signals.uninstall()

    def next_batch(self) -> Any:
        """The next batch of this process; None if a signal ended the wait for it."""
        try:
            return self._signals.wait(lambda: next(self.session.batches))
        except InputWaitEnded:
            self.session.stop_signal = self._signals.asked
            log_message("the input gives no batch; stopping without it")
            return None

    def stops(self) -> bool:
        """Whether the run stops at this step.

        Several processes agree on it: for SIGTERM, the notice of a preemption, at the next step; for SIGINT at the next step that
        is logged.
        """
        run, signal_number = self.session, self._signals.asked
        if jax.process_count() > 1 and run.stop_signal is None:
            if self._agreement is not None and self._agreement.reached(run.step):
                return True
            if preempted(run.step):
                log_message("one of the processes was sent SIGTERM: stopping here, then saving")
                run.stop_signal = signal.SIGTERM
                return True
            if run.step % run.log_every_steps:
                return False
            signal_number = int(multihost_utils.process_allgather(np.asarray(signal_number or 0)).max()) or None
        run.stop_signal = run.stop_signal or signal_number
        return run.stop_signal is not None

    def raise_failure(self) -> None:
        """Raises `InputError` on every process if the input of one of them stopped the run."""
        if self._agreement is None or not self._agreement.reason:
            return
        self.session.checkpointer.wait()
        raise InputError(f"{self._agreement.reason}\n    step {self.session.step} is saved")

    def _stop_all(self, error: Exception) -> None:
        if self._agreement is not None:
            self._agreement.ask(f"{type(error).__name__}: {error}")


def stops(session: Any) -> Stops:
    """The listener of a run."""
    return Stops(session)


def preempted(step: int) -> bool:
    """Whether the job stops at this step because one of its processes was sent SIGTERM, which all of them agree on.

    Call it before every step. In a job of one process, JAX does not watch for the signal.
    """
    if jax.process_count() == 1 or not jax.config.values["jax_enable_preemption_service"]:
        return False
    return multihost_utils.reached_preemption_sync_point(step)


def _announce_stop() -> None:
    log_message(
        "stopping after this step, then saving; once more stops at once and loses the steps since the last checkpoint"
    )
