"""A run between its request and its first step: the parts that are built, and what is restored."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import attrs
import jax

from axlearn_core.compose import Program
from axlearn_core.compose.state import TrainState
from axlearn_core.contracts.capabilities import ReportsSaves
from axlearn_core.contracts.parts import BatchIterator, Checkpointer, Input, Watchdog
from axlearn_core.plugins.decisions import Decision
from axlearn_core.run.phases import PhaseClock
from axlearn_core.run.record import RunDir
from axlearn_core.train.evaluators import Evaluator
from axlearn_core.train.loop import Loop
from axlearn_core.train.mirror import RunMirror
from axlearn_core.train.ownership import SAVED
from axlearn_core.train.session import log_message


@attrs.define(kw_only=True, eq=False)
class OpenRun:
    """A run whose parts are built. `state` is None, and `begins` true, until a checkpoint is restored."""

    run_dir: RunDir
    closing: ExitStack
    clock: PhaseClock
    program: Program
    source: Input
    batches: BatchIterator
    evaluators: Mapping[str, Evaluator]
    loop: Loop
    checkpointer: Checkpointer
    mirror: RunMirror | None
    old_lock: Mapping[str, Any]
    run_id: str
    check_held: Callable[[], None]
    watchdog: Watchdog | None
    facts: Mapping[str, Any]
    state: TrainState | None = None
    step: int = 0
    begins: bool = True


@attrs.define(eq=False)
class OnSave:
    """Checks after a save that the run is still this process's, notes the checkpoint in the lock, and pushes the mirror."""

    run: OpenRun
    saved: bool

    def __call__(self) -> None:
        """Raises where another process took the run."""
        self.run.check_held()
        if jax.process_index() != 0:
            return
        if not self.saved and self.run.checkpointer.latest_step() is not None:
            self.saved = True
            self.run.run_dir.write_fact(SAVED, True)
        if self.run.mirror:
            self.run.mirror.push()


def record_decision(run: OpenRun, decision: Decision) -> None:
    """Shows a decision that a function's compilation took, and keeps it in the lock."""
    log_message(str(decision))
    if jax.process_index() == 0 or run.mirror:
        run.run_dir.add_decision(decision)


def record_saves(checkpointer: Checkpointer, clock: PhaseClock) -> None:
    """Each save's result goes to the clock, where the checkpointer can say it."""
    if isinstance(checkpointer, ReportsSaves):
        checkpointer.on_result = clock.checkpoint
