"""Schedulers, which choose the tokens that the next step computes.

A scheduler fills the engine's `scheduler` slot and is offered `cache` (see `axlearn_plugins_serving.cache`) and `limits`. Any
class that implements `Scheduler` can fill the slot.
"""

import bisect
from collections.abc import Collection
from typing import Protocol

import attrs

from axlearn_core.config import Configurable, node, offers, setting
from axlearn_core.errors import ConfigError, Problem
from axlearn_plugins_serving.cache import Cache
from axlearn_plugins_serving.request_state import RequestState
from axlearn_plugins_serving.waiting_queue import WaitingQueue


@attrs.frozen(kw_only=True)
class Limits:
    """A runner's limits for one step.

    Attributes:
        rows: Maximum number of running requests.
        step_tokens: Maximum number of tokens in all rows.
        prompt_tokens: Maximum number of prompt tokens, in whole chunks.
        chunk: Number of prompt tokens that are computed together; a partial chunk costs as much as a full one.
        positions: Maximum number of cached positions of one request.
        prefix: Number of leading tokens of a prompt that one step must contain.
    """

    rows: int
    step_tokens: int
    prompt_tokens: int
    chunk: int = 1
    positions: int
    prefix: int = 0


@attrs.frozen
class Part:
    """One request's part of a step.

    It computes `count` tokens and then chooses the next one if `sample` is set.

    Attributes:
        decodes: Whether to compute the last chosen token, which may not have been read from the devices yet.
        draft: Drafted tokens for the model to verify; see `axlearn_plugins_serving.drafting`.
    """

    state: RequestState
    start: int
    count: int
    sample: bool
    decodes: bool
    draft: tuple[int, ...] = ()


@attrs.define
class SchedulerOutput:
    """The plan of a step.

    Attributes:
        parts: At most one part per request.
        admitted: Requests that start in this step. They have slots, and each has a part.
        copies: Blocks to copy before the step, as (source, target).
        steps: Number of tokens to choose in each part; 1 unless all parts decode.
        preemptions: Number of requests that lost their blocks.
    """

    parts: list[Part] = attrs.field(factory=list)
    admitted: list[RequestState] = attrs.field(factory=list)
    copies: list[tuple[int, int]] = attrs.field(factory=list)
    steps: int = 1
    preemptions: int = 0


@offers("cache", "limits")
class Scheduler(Protocol):
    """Schedules requests, and assigns blocks and slots to them through the cache."""

    @property
    def running(self) -> Collection[RequestState]:
        """The requests that hold blocks."""
        ...

    def waiting(self) -> int:
        """Return the number of waiting requests."""
        ...

    def add(self, state: RequestState) -> None:
        """Add a new request."""
        ...

    def remove(self, state: RequestState) -> None:
        """Remove a waiting or running request and free its resources."""
        ...

    def plan(self, max_steps: int) -> SchedulerOutput:
        """Plan the next step.

        The plan has no parts if nothing can be computed before results are read.

        Steps may be in flight; `computed` and `inflight` of each request include them. This method changes neither, because
        the engine updates both when it submits the step. A part that decodes has `remaining` > 0.

        Args:
            max_steps: Maximum number of tokens to choose in each part.
        """
        ...


class PriorityScheduler(Configurable):
    """Continuous batching.

    Each step decodes all requests that can decode, and is then filled with prompt chunks.

    Requests start by priority, and clients take turns. If the cache is full, the newest request of the lowest priority is
    preempted and computed again later.
    """

    @node
    class Config(Configurable.Config["PriorityScheduler"]):
        """Limits on the size of a step.

        Attributes:
            step_tokens: Maximum number of tokens in a step; None uses the runner's limit. A smaller value shortens steps
                with prompts: other requests get tokens more evenly, and prompts take longer.
            joint_prompt_tokens: Stop adding prompts to a step that has this many prompt tokens. Prompts in the same step all
                wait for the longest. In separate steps, the first prompt ends sooner and, on CPUs, the last prompt ends no
                later. This was not measured on accelerators. Values that are too small to keep the processor busy waste time.
            preempt_for_priority: Whether a request may preempt one of lower priority.
        """

        step_tokens: int | None = setting(default=None, ge=1)
        joint_prompt_tokens: int = setting(default=192, ge=1)
        preempt_for_priority: bool = True

    def __init__(self, cfg: Config, *, cache: Cache, limits: Limits):
        if cfg.step_tokens is not None and cfg.step_tokens < limits.rows:
            raise ConfigError(
                Problem(
                    path="scheduler.step_tokens",
                    message="each running request needs a token per step",
                    got=str(cfg.step_tokens),
                    expected=f"at least {limits.rows}, the number of requests that can run",
                    fix="raise it, or lower the runner's max_rows",
                )
            )
        self.cache, self.limits = cache, limits
        self.budget = min(cfg.step_tokens or limits.step_tokens, limits.step_tokens)
        if self.budget < limits.prefix:
            raise ConfigError(
                Problem(
                    path="scheduler.step_tokens",
                    message="a step cannot contain the prefix, whose tokens attend to each other in both directions",
                    got=str(cfg.step_tokens),
                    expected=f"at least {limits.prefix}",
                    fix="raise it",
                )
            )
        self.joint_prompt_tokens = cfg.joint_prompt_tokens
        self.preempts = cfg.preempt_for_priority
        self._running: list[RequestState] = []  # in order of priority; the last is preempted first
        self.queue = WaitingQueue()

    @property
    def running(self) -> list[RequestState]:
        """See `Scheduler.running`."""
        return self._running

    def waiting(self) -> int:
        """See `Scheduler.waiting`."""
        return len(self.queue)

    def add(self, state: RequestState) -> None:
        """See `Scheduler.add`."""
        self.queue.push(state)

    def remove(self, state: RequestState) -> None:
        """See `Scheduler.remove`."""
        if state.slot is None:
            self.queue.remove(state)
        else:
            self._running.remove(state)
            self.cache.end(state)

    def plan(self, max_steps: int) -> SchedulerOutput:
        """See `Scheduler.plan`."""
        plan = SchedulerOutput()
        self._plan_decoding(plan)
        self._plan_new_requests(plan, self._plan_prompts(plan))
        if max_steps > 1 and self._all_decode(plan):
            plan.steps = self._choose_steps(plan, max_steps)
        return plan

    def _plan_decoding(self, plan: SchedulerOutput) -> None:
        index = 0
        while index < len(self._running) and len(plan.parts) < self.budget:
            state = self._running[index]
            if state.decodes and state.remaining > 0:
                while not self.cache.extend(state, state.computed + 1):
                    victim = self._running[-1]
                    self._preempt(victim, plan)
                    if victim is state:
                        return
                plan.parts.append(Part(state, state.computed, 1, True, True))
            index += 1

    def _plan_prompts(self, plan: SchedulerOutput) -> int:
        """Continue prompts that have started.

        Return the remaining budget of prompt tokens.
        """
        budget = self._prompt_budget(plan)
        for state in self._running:
            if budget <= 0:
                break
            if not state.decodes:
                budget -= self._plan_chunk(plan, state, budget)
        return budget

    def _prompt_budget(self, plan: SchedulerOutput) -> int:
        decoding = sum(part.decodes for part in plan.parts)
        return min(self.budget - decoding, self.limits.prompt_tokens)

    def _plan_new_requests(self, plan: SchedulerOutput, budget: int) -> None:
        if plan.preemptions:
            return
        total, growing = self._prompt_budget(plan), None
        while budget >= max(1, self.limits.prefix):
            state = self.queue.first()
            if state is None or state.inflight:  # the results in flight may end this request
                return
            if total - budget >= self.joint_prompt_tokens and not self._outranks_prompts(state, plan):
                return
            match = self.cache.find(state)
            if match is None:
                return
            if growing is None:
                growing = sum(map(self._may_grow, self._running))
            copies = self.cache.begin(state, match, headroom=growing)
            if copies is None:
                if not self._make_room(state, plan):
                    return
                growing = None
                continue
            growing += self._may_grow(state)
            self.queue.take(state)
            bisect.insort(self._running, state, key=lambda s: s.order)
            plan.admitted.append(state)
            plan.copies += copies
            budget -= self._plan_chunk(plan, state, budget)

    def _may_grow(self, state: RequestState) -> bool:
        """Return True if a running request may need more blocks before it ends."""
        return state.prompt_length + state.limit > len(state.blocks) * self.cache.pool.block_size

    def _plan_chunk(self, plan: SchedulerOutput, state: RequestState, budget: int) -> int:
        """Add tokens of a prompt, in whole chunks if at least one chunk fits.

        Return how much of the budget they use.
        """
        chunk = self.limits.chunk
        room = budget // chunk * chunk or budget
        count = min(state.target - state.computed, room)
        last = state.computed + count == state.target
        plan.parts.append(Part(state, state.computed, count, last and state.remaining > 0, False))
        in_row = count == 1 and not (state.request.extras and state.computed < state.prompt_length)
        return 1 if in_row else -(-count // chunk) * chunk

    def _outranks_prompts(self, state: RequestState, plan: SchedulerOutput) -> bool:
        """Return True if a request has a higher priority than a prompt in the step."""
        prompts = [part.state for part in plan.parts if not part.decodes]
        return any(state.request.priority < other.request.priority for other in prompts)

    def _make_room(self, state: RequestState, plan: SchedulerOutput) -> bool:
        """Preempt the last running request if its priority is lower.

        Returns False otherwise.
        """
        if not (self.preempts and self._running) or self._running[-1].request.priority <= state.request.priority:
            return False
        victim = self._running[-1]
        plan.parts = [part for part in plan.parts if part.state is not victim]
        self._preempt(victim, plan)
        return True

    def _preempt(self, state: RequestState, plan: SchedulerOutput) -> None:
        self._running.remove(state)
        self.cache.end(state)
        self.queue.push_front(state)
        plan.preemptions += 1

    def _all_decode(self, plan: SchedulerOutput) -> bool:
        return bool(plan.parts) and all(part.decodes and not part.state.needs_mask for part in plan.parts)

    def _choose_steps(self, plan: SchedulerOutput, steps: int) -> int:
        """Return `steps` if the cache has room and few tokens would be wasted, else 1."""
        states = [part.state for part in plan.parts]
        useful = [min(state.remaining, steps) for state in states]
        if self.queue and min(useful) < steps:  # a waiting request can start as soon as a running one ends
            return 1
        if 2 * sum(useful) < steps * len(states):
            return 1
        if any(state.computed + steps > self.limits.positions for state in states):
            return 1
        return steps if all(self.cache.extend(state, state.computed + steps) for state in states) else 1
