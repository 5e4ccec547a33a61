"""The stream of training batches that are made of rollouts."""

import functools
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import attrs
import numpy as np

from axlearn_core.run.notices import log_message
from axlearn_core.train.session import Session
from axlearn_plugins_rl.host_clock import HostClock
from axlearn_plugins_rl.rollout_contracts import Buffer, Group
from axlearn_plugins_rl.rollout_exchange import RolloutExchange
from axlearn_plugins_rl.rollout_metrics import combine_times, summarize_groups
from axlearn_plugins_rl.rollout_worker import RolloutWorker


@attrs.frozen(kw_only=True)
class BatchFacts:
    """Facts about a batch of rollouts.

    Attributes:
        version: Version of the weights that drew its tokens.
        end: Position in the stream of examples after the batch, over all processes.
        scalars: Scalars to log with the step that trains on the batch.
    """

    version: int
    end: int
    scalars: Mapping[str, float] = {}


Result = tuple[Sequence[Group], BatchFacts]
"""Groups of a batch that this process rolled out, and facts about it."""


@attrs.define
class Cursor:
    """A position in the stream of examples. Jobs move it when they end."""

    position: int


class RolloutBatches:
    """The batches that a training loop reads; see `axlearn_core.contracts.parts.BatchIterator`.

    Each process rolls out its share of a batch. The processes exchange the scores when they have all finished, so a batch that
    fails on one process fails on all of them.

    Batch number n is trained on by step n. Its rollouts start as soon as the buffer admits the weights. It stays in the buffer
    until its step has finished, so a checkpoint at any moment contains each batch whose weights are gone.

    Args:
        session: The run.
        worker: Runs the rollouts.
        buffer: Holds the batches.
        roll_out: Makes a batch from (weights, version, cursor), and moves the cursor.
        weights: Returns the weights for the rollouts from the training state. They must stay valid until the job has ended.
        build_rows: Builds the arrays of a batch from its number, the groups of this process, and the groups of all processes.
        position: Position in the stream of examples.
        exchange: Exchanges the scores with the other processes.
        clock: Measures the work of the main thread. The batch starts it, and the listeners of the session stop it.

    Attributes:
        facts: Facts about the batches in the buffer, by number.
        whole: Groups of all processes for the batches in the buffer, by number, if there are several. The groups of other
            processes have only scores.
    """

    follows_training = "are rollouts of the present weights"

    def __init__(
        self,
        session: Session,
        *,
        worker: RolloutWorker,
        buffer: Buffer,
        roll_out: Callable[[Any, int, Cursor], Coroutine[Any, Any, Result]],
        weights: Callable[[Any], Any],
        build_rows: Callable[[int, Sequence[Group], Sequence[Group]], dict[str, np.ndarray]],
        position: int,
        exchange: RolloutExchange | None = None,
        clock: HostClock | None = None,
    ):
        self._session, self._worker, self._buffer = session, worker, buffer
        self._roll_out, self._weights, self._build_rows = roll_out, weights, build_rows
        self._exchange = exchange or RolloutExchange()
        self._cursor, self._trained_end = Cursor(position), position
        self._jobs: dict[int, tuple[int, Future[Result]]] = {}
        self.facts: dict[int, BatchFacts] = {}
        self.whole: dict[int, Sequence[Group]] = {}
        self._latest: list[str] = []
        self._clock = clock or HostClock()

    def __iter__(self) -> "RolloutBatches":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """Return the batch for the session's step, and start the rollouts that its weights may draw."""
        session, number = self._session, self._session.step
        session.start_phase("rollout")
        self._clock.start()
        self._forget_trained()
        self._start_jobs()
        self._clock.stop()
        start = time.perf_counter()
        self._collect(number)
        waited = time.perf_counter() - start
        self._clock.start()
        groups, facts = self._buffer.take(number), self.facts[number]
        self._buffer.put(number, groups)  # until its step has finished
        self._latest = [group.example.id for group in groups]
        rows = self._build_rows(number, groups, self.whole.get(number, groups))
        times = {"rollout_wait": waited, "host_seconds": self._clock.lap()}
        session.host_scalars = {**facts.scalars, "rollout_age": float(number - facts.version), **times}
        return rows

    def _start_jobs(self) -> None:
        """Start the rollouts of the batches that the buffer admits for the present weights."""
        version, weights = self._session.step, None
        numbers = [*self._buffer.numbers(), *self._jobs]
        number = max(numbers, default=version - 1) + 1
        while number < self._session.max_steps and self._buffer.admits(number, version):
            weights = self._weights(self._session.state) if weights is None else weights
            job = functools.partial(self._roll_out, weights, version, self._cursor)
            self._jobs[number] = version, self._worker.submit(job)
            number += 1

    def _collect(self, number: int) -> None:
        """Wait for the rollouts of a batch and add it to the buffer. Do nothing if the buffer holds it.

        If the rollouts fail on any process, raise an error on all of them.
        """
        if number not in self._jobs:
            return
        _, future = self._jobs[number]

        def wait() -> tuple[Sequence[Group], Mapping[str, float]]:
            groups, facts = future.result()
            return groups, facts.scalars

        gathered = self._exchange.gather_groups(wait, f"the rollouts of step {number + 1}")
        groups, facts = future.result()
        del self._jobs[number]
        self._buffer.put(number, groups)
        scalars = {**summarize_groups(gathered.groups), **combine_times(gathered.scalars)}
        self.facts[number] = attrs.evolve(facts, scalars=scalars)
        if gathered.groups is not groups:
            self.whole[number] = gathered.groups

    def _remove(self, number: int) -> BatchFacts:
        """Remove a batch from the buffer, and return the facts about it."""
        self._buffer.take(number)
        self.whole.pop(number, None)
        return self.facts.pop(number)

    def _forget_trained(self) -> None:
        for number in [n for n in self._buffer.numbers() if n < self._session.step]:
            self._trained_end = self._remove(number).end

    def finish_rollouts(self) -> None:
        """Wait for batches of older weights. Drop those of the present weights, because the next attempt draws them again.

        The buffer and the position are then those of a run that stops after the session's step.
        """
        step = self._session.step
        self._forget_trained()
        try:
            for number in sorted(n for n, (version, _) in self._jobs.items() if version < step):
                self._collect(number)
        except Exception as error:  # the loop raises the error too
            log_message(f"note: the next attempt draws the rollouts that failed again, with newer weights: {error}")
        for _, future in self._jobs.values():
            future.cancel()
        end = min(self._jobs, default=self._session.max_steps)
        for number in [n for n in self._buffer.numbers() if n > end or self.facts[n].version >= step]:
            self._remove(number)
        self._jobs.clear()
        self._cursor = Cursor(self._end)

    @property
    def _end(self) -> int:
        numbers = self._buffer.numbers()
        return self.facts[numbers[-1]].end if numbers else self._trained_end

    def get_state(self) -> Any:
        """Return the position in the stream of examples after the batches that a checkpoint contains."""
        self.finish_rollouts()
        return {"position": self._end}

    def set_state(self, state: Any) -> None:
        """Move to a position in the stream of examples."""
        self._cursor = Cursor(int(state["position"]))
        self._trained_end = self._cursor.position

    def describe_position(self) -> str:
        """Return the ids of the examples of the latest batch."""
        more = len(self._latest) - 3
        return "; ".join(self._latest[:3]) + (f"; and {more} more" if more > 0 else "")

    def close(self) -> None:
        """Cancel the rollouts in progress."""
        for _, future in self._jobs.values():
            future.cancel()
