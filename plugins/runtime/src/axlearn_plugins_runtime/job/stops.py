"""Early stops of a run: by a signal, a preemption, or an input failure in one process."""

import signal
from typing import Any

import jax
from jax.experimental import multihost_utils

from axlearn_core.contracts.capabilities import FollowsTraining
from axlearn_core.errors import InputError
from axlearn_core.run.events import RunListener
from axlearn_core.run.notices import log_message
from axlearn_plugins_runtime.job.input_failure import LookAhead, StopAgreement
from axlearn_plugins_runtime.job.signals import InputWaitEnded, StopSignals
from axlearn_plugins_runtime.process_max import max_over_processes


class EarlyStop(RunListener):
    """Stops a run early, at the same step on every process. See `axlearn_core.contracts.capabilities.StopsEarly`.

    Args:
        session: Session of the run.
    """

    errors_name_plugin = False

    def __init__(self, session: Any):
        self.session = session
        # In a multi-process job, the other processes would wait for a process that stops waiting for its batch.
        self._signals = StopSignals(_announce_stop, ends_input=jax.process_count() == 1)
        self._agreement: StopAgreement | None = None

    def begin(self) -> None:
        """Install the signal handlers. In a multi-process job, also read batches ahead if possible."""
        # In a multi-process job JAX handles SIGTERM and notifies all processes; see `is_preempted`.
        run = self.session
        if jax.process_count() > 1 and not isinstance(run.batches, FollowsTraining):
            self._agreement = StopAgreement(run.step)
            run.batches = LookAhead(run.batches, run.max_steps - run.step, self._stop_all)
        self._signals.install(*((signal.SIGINT,) if jax.process_count() > 1 else (signal.SIGINT, signal.SIGTERM)))

    def end(self) -> None:
        """Restore the previous signal handlers."""
        if self._agreement is not None:
            self._agreement.close()
        self._signals.uninstall()

    def next_batch(self) -> Any:
        """Return the next batch of this process, or None if a signal ended the wait."""
        try:
            return self._signals.wait(lambda: next(self.session.batches))
        except InputWaitEnded:
            self.session.stop_signal = self._signals.signal_number
            log_message("the input returned no batch in time; stopping without it")
            return None

    def should_stop(self) -> bool:
        """Return True if the run stops at this step.

        All processes agree. SIGTERM, which announces a preemption, stops the run at the next step. SIGINT stops it at the next
        logged step.
        """
        run, signal_number = self.session, self._signals.signal_number
        if jax.process_count() > 1 and run.stop_signal is None:
            if self._agreement is not None and self._agreement.reached(run.step):
                return True
            if is_preempted(run.step):
                log_message("a process received SIGTERM: saving and stopping")
                run.stop_signal = signal.SIGTERM
                return True
            if run.step % run.log_every_steps:
                return False
            signal_number = max_over_processes([signal_number or 0])[0] or None
        run.stop_signal = run.stop_signal or signal_number
        return run.stop_signal is not None

    def raise_failure(self) -> None:
        """Raise `InputError` on every process if an input failure stopped the run."""
        if self._agreement is None or not self._agreement.reason:
            return
        self.session.checkpointer.wait()
        raise InputError(f"{self._agreement.reason}\n    saved step {self.session.step}")

    def _stop_all(self, error: Exception) -> None:
        if self._agreement is not None:
            self._agreement.ask(f"{type(error).__name__}: {error}")


def early_stop(session: Any) -> EarlyStop:
    """Return the listener for a run."""
    return EarlyStop(session)


def is_preempted(step: int) -> bool:
    """Return True if the job stops at this step because a process received SIGTERM. All processes agree.

    Call it before every step. Returns False in a single-process job, in which JAX does not handle the signal.
    """
    if jax.process_count() == 1 or not jax.config.values["jax_enable_preemption_service"]:
        return False
    return multihost_utils.reached_preemption_sync_point(step)


def _announce_stop() -> None:
    log_message(
        "saving and stopping after this step; a second signal stops at once and loses the steps since the last checkpoint"
    )
