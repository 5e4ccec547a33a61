"""Counters and times of an engine."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator

from axlearn_plugins_serving.contracts import Statistics
from axlearn_plugins_serving.scheduler import Plan

MIN_RETRY, MAX_RETRY = 1.0, 60.0
"""Seconds; between these lies what is said to who is refused."""


class Meter:
    """Counts what an engine does, and estimates from it."""

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_prompt_tokens = self.output_tokens = self.preemptions = self.steps = 0
        self.drafted_tokens = self.accepted_tokens = 0
        self.runner_seconds = self.host_seconds = 0.0
        self._in_runner = 0.0
        self._token_seconds: float | None = None  # of one decoded token of each request
        self._last_read: float | None = None
        self._begins: deque[float] = deque(maxlen=64)

    @contextlib.contextmanager
    def runner(self) -> Iterator[None]:
        """Counts time as the runner's."""
        started = time.perf_counter()
        yield
        self._in_runner += time.perf_counter() - started

    def record_step(self, seconds: float) -> None:
        """Takes the whole time of a step of the engine."""
        self.runner_seconds += self._in_runner
        self.host_seconds += max(0.0, seconds - self._in_runner)
        self._in_runner = 0.0

    def record_begin(self, prompt_tokens: int, cached: int) -> None:
        """Counts a request that begins."""
        self.prompt_tokens += prompt_tokens
        self.cached_prompt_tokens += cached
        self._begins.append(time.monotonic())

    def record_submit(self, plan: Plan) -> None:
        """Counts a step of the runner."""
        self.steps += 1

    def record_read(self, plan: Plan) -> None:
        """Takes the time since the results before, where both are of steps that only decode."""
        now = time.perf_counter()
        if not all(part.decodes for part in plan.parts):
            self._last_read = None
            return
        if self._last_read is not None:
            seconds = (now - self._last_read) / plan.steps
            old = self._token_seconds
            self._token_seconds = seconds if old is None else 0.8 * old + 0.2 * seconds
        self._last_read = now

    def fits(self, steps: int, seconds: float) -> bool:
        """Whether so many decoding steps take less than this time. Not known before some were measured."""
        return self._token_seconds is not None and steps * self._token_seconds <= seconds

    def retry_after(self, waiting: int) -> float:
        """Seconds in which about a tenth of the waiting requests will have begun."""
        if len(self._begins) < 2:
            return MIN_RETRY
        per_request = (time.monotonic() - self._begins[0]) / len(self._begins)
        return min(MAX_RETRY, max(MIN_RETRY, per_request * waiting / 10))

    def statistics(self, **state: int) -> Statistics:
        """The counters, with what is passed on."""
        return Statistics(
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            output_tokens=self.output_tokens,
            preemptions=self.preemptions,
            steps=self.steps,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            step_seconds=self.runner_seconds,
            host_seconds=self.host_seconds,
            **state,
        )
