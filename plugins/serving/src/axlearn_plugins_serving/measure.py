"""Counters and times of an engine."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator

from axlearn_plugins_serving.contracts import Statistics
from axlearn_plugins_serving.scheduler import Plan

REMEMBERED, CHUNK = 8, 32
"""Steps of one shape whose times are kept, and by how many tokens of prompts shapes differ."""
PLANS, IN_TIME, SHORTER, SUBMIT_SECONDS = 64, 0.75, 0.95, 0.004
"""The next step is planned so long before the end of this one that this share of so many plans took less, and has this time to be
submitted; this step may take so much less than the shortest of its shape. A few plans take long: the thread was not woken up."""
LONGEST_WAIT = 1.0
"""Seconds for which a plan waits at most."""

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
        self._free_at = 0.0  # when the devices began, or will have begun, with the step in flight
        self._durations: dict[tuple[int, int, int], deque[float]] = {}
        self._plan_at = 0.0  # when the next step is to be planned
        self._plan_seconds: deque[float] = deque(maxlen=PLANS)

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

    def record_plan(self, *, waited: bool) -> None:
        """Takes the time that the next step was planned in; `waited` where that was for the results of the step in flight."""
        if self._plan_at and not waited:
            self._plan_seconds.append(max(0.0, time.perf_counter() - self._plan_at))
        self._plan_at = 0.0

    def record_submit(self, previous: Plan | None) -> None:
        """Counts a step of the runner; `previous` is the one in flight before it."""
        self.steps += 1
        if previous is None:
            self._free_at = time.perf_counter()

    def record_read(self, plan: Plan) -> None:
        """Takes the time of a step, and that since the results before where both are of steps that only decode."""
        now, shape = time.perf_counter(), _shape(plan)
        if self._in_runner > SUBMIT_SECONDS:
            self._durations.setdefault(shape, deque(maxlen=REMEMBERED)).append(now - self._free_at)
        else:  # nobody waited for its end, so when that was is not known: the next step was planned too late
            self._durations.pop(shape, None)
        self._free_at = now  # where another step is in flight, it begins
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

    def spare_seconds(self, plan: Plan) -> float:
        """For how long after now the step that follows `plan`, which computes, need not be planned; 0 where nothing is known."""
        durations = self._durations.get(_shape(plan))
        if durations is None or len(durations) < 2 or all(part.state.finished for part in plan.parts):
            return 0.0
        seconds = SHORTER * min(durations)
        plans = sorted(self._plan_seconds)
        needed = SUBMIT_SECONDS + (plans[int(IN_TIME * (len(plans) - 1))] if plans else seconds)
        self._plan_at = self._free_at + max(0.0, seconds - needed)
        return min(LONGEST_WAIT, max(0.0, self._plan_at - time.perf_counter()))

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


def _shape(plan: Plan) -> tuple[int, int, int]:
    """What the time of a step depends on most: tokens of each row, how many rows decode (by powers of 2), chunks of prompts."""
    chunks = sum(-(-part.count // CHUNK) for part in plan.parts if not part.decodes)
    decoding = sum(part.decodes for part in plan.parts)
    return plan.steps, (decoding - 1).bit_length() if decoding else -1, chunks
