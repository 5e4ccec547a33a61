"""Counters and timings of an engine."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from axlearn_plugins_serving.contracts import Statistics
from axlearn_plugins_serving.scheduler import SchedulerOutput

MAX_DURATIONS, CHUNK = 8, 32
"""Number of durations to keep per step shape, and the granularity of shapes in prompt tokens."""
MAX_PLANS, PLAN_QUANTILE, DURATION_SCALE, SUBMIT_SECONDS = 64, 0.75, 0.95, 0.004
"""Constants that decide when to plan the next step. The step in flight is assumed to end after `DURATION_SCALE` times the shortest
duration of its shape. Planning starts early enough that a fraction `PLAN_QUANTILE` of the last `MAX_PLANS` plans would have
finished, with `SUBMIT_SECONDS` to spare. A few plans take much longer because the thread was not scheduled."""
MAX_WAIT = 1.0
"""Maximum number of seconds to delay planning."""

MIN_RETRY, MAX_RETRY = 1.0, 60.0
"""Bounds on the time after which a rejected request should be retried, in seconds."""


class Meter:
    """Counts an engine's work and estimates durations."""

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_prompt_tokens = self.output_tokens = self.preemptions = self.steps = 0
        self.drafted_tokens = self.accepted_tokens = 0
        self.runner_seconds = self.host_seconds = 0.0
        self._step_runner_seconds = 0.0
        self._token_seconds: float | None = None  # moving average of the time to decode one token per request
        self._last_read: float | None = None
        self._start_times: deque[float] = deque(maxlen=64)
        self._free_time = 0.0  # when the devices start, or started, the step in flight
        self._durations: dict[tuple[int, int, int], deque[float]] = {}
        self._plan_time = 0.0  # when to plan the next step
        self._plan_seconds: deque[float] = deque(maxlen=MAX_PLANS)

    @contextlib.contextmanager
    def time_runner(self) -> Iterator[None]:
        """Count the time in this context as the runner's."""
        started = time.perf_counter()
        yield
        self._step_runner_seconds += time.perf_counter() - started

    def record_step(self, seconds: float) -> None:
        """Record the total time of an engine step."""
        self.runner_seconds += self._step_runner_seconds
        self.host_seconds += max(0.0, seconds - self._step_runner_seconds)
        self._step_runner_seconds = 0.0

    def record_begin(self, prompt_tokens: int, cached: int) -> float:
        """Count a request that starts, and return the time."""
        self.prompt_tokens += prompt_tokens
        self.cached_prompt_tokens += cached
        self._start_times.append(now := time.monotonic())
        return now

    def record_plan(self, *, waited: bool) -> None:
        """Record how long planning took.

        `waited` is True if planning waited for the results of the step in flight.
        """
        if self._plan_time and not waited:
            self._plan_seconds.append(max(0.0, time.perf_counter() - self._plan_time))
        self._plan_time = 0.0

    def record_submit(self, previous: SchedulerOutput | None) -> None:
        """Count a runner step. `previous` is the step in flight before it."""
        self.steps += 1
        if previous is None:
            self._free_time = time.perf_counter()

    def record_read(self, plan: SchedulerOutput) -> None:
        """Record the duration of a step.

        If this step and the one before it only decode, also record the time between their results.
        """
        now, shape = time.perf_counter(), _step_shape(plan)
        if self._step_runner_seconds > SUBMIT_SECONDS:
            self._durations.setdefault(shape, deque(maxlen=MAX_DURATIONS)).append(now - self._free_time)
        else:  # the engine planned too late, so the step ended at an unknown time before this read
            self._durations.pop(shape, None)
        self._free_time = now  # the next step in flight starts now
        if not all(part.decodes for part in plan.parts):
            self._last_read = None
            return
        if self._last_read is not None:
            seconds = (now - self._last_read) / plan.steps
            previous = self._token_seconds
            self._token_seconds = seconds if previous is None else 0.8 * previous + 0.2 * seconds
        self._last_read = now

    def fits(self, steps: int, seconds: float) -> bool:
        """Return True if this many decoding steps take at most `seconds`.

        Returns False until decoding steps have been measured, unless the time is infinite.
        """
        if seconds == math.inf:
            return True
        return self._token_seconds is not None and steps * self._token_seconds <= seconds

    def spare_seconds(self, plan: SchedulerOutput) -> float:
        """Return the seconds until the step after `plan` must be planned, or 0 if unknown."""
        durations = self._durations.get(_step_shape(plan))
        if durations is None or len(durations) < 2 or all(part.state.finished for part in plan.parts):
            return 0.0
        seconds = DURATION_SCALE * min(durations)
        plans = sorted(self._plan_seconds)
        needed = SUBMIT_SECONDS + (plans[int(PLAN_QUANTILE * (len(plans) - 1))] if plans else seconds)
        self._plan_time = self._free_time + max(0.0, seconds - needed)
        return min(MAX_WAIT, max(0.0, self._plan_time - time.perf_counter()))

    def retry_after(self, waiting: int) -> float:
        """Estimate the seconds until a tenth of the waiting requests have started."""
        if len(self._start_times) < 2:
            return MIN_RETRY
        per_request = (time.monotonic() - self._start_times[0]) / len(self._start_times)
        return min(MAX_RETRY, max(MIN_RETRY, per_request * waiting / 10))

    def statistics(self, **state: Any) -> Statistics:
        """Return the counters together with `state`."""
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


def _step_shape(plan: SchedulerOutput) -> tuple[int, int, int]:
    """Return the properties that step times depend on.

    These are the tokens per row, the number of decoding rows (rounded up to a power of 2), and the number of prompt chunks.
    """
    chunks = sum(-(-part.count // CHUNK) for part in plan.parts if not part.decodes)
    decoding = sum(part.decodes for part in plan.parts)
    return plan.steps, (decoding - 1).bit_length() if decoding else -1, chunks
