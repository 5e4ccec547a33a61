"""Which request computes which of its tokens in the next step.

A scheduler is a node in the slot `scheduler` of the engine. It is offered `cache` (see `axlearn_plugins_serving.cache`) and
`limits`; whoever keeps the protocol can stand there.
"""

import bisect
from collections.abc import Collection
from typing import Protocol

import attrs

from axlearn_core.config import Configurable, node, offers, setting
from axlearn_core.errors import ConfigError, Problem
from axlearn_plugins_serving.cache import Cache
from axlearn_plugins_serving.request_state import RequestState
from axlearn_plugins_serving.waiting import WaitingQueue


@attrs.frozen(kw_only=True)
class Limits:
    """What a runner can do in one step.

    Attributes:
        rows: requests that can run at one time.
        step_tokens: tokens of all rows together.
        prompt_tokens: of them those of prompts, in whole chunks.
        chunk: tokens of a prompt that are computed together: fewer take as long.
        positions: of one request in the cache.
    """

    rows: int
    step_tokens: int
    prompt_tokens: int
    chunk: int = 1
    positions: int


@attrs.frozen
class Part:
    """One request's part of a step: `count` of its tokens, and then whether the next one is chosen.

    Attributes:
        decodes: the token is the one that was chosen last, which only the runner has to know yet.
        draft: of the tokens those that the model has to confirm; see `axlearn_plugins_serving.drafting`.
    """

    state: RequestState
    start: int
    count: int
    sample: bool
    decodes: bool
    draft: tuple[int, ...] = ()


@attrs.define
class Plan:
    """A step.

    Attributes:
        parts: at most one for each request.
        begun: requests that begin, with their slots; each has a part.
        copies: blocks to copy before the step, (source, target).
        steps: how many tokens each part chooses; above 1 only where all decode.
        preemptions: how many requests lost their blocks.
    """

    parts: list[Part] = attrs.field(factory=list)
    begun: list[RequestState] = attrs.field(factory=list)
    copies: list[tuple[int, int]] = attrs.field(factory=list)
    steps: int = 1
    preemptions: int = 0


@offers("cache", "limits")
class Scheduler(Protocol):
    """Orders requests. It gives them blocks and slots through the cache, and takes them back."""

    @property
    def running(self) -> Collection[RequestState]:
        """The requests that have blocks."""
        ...

    def waiting(self) -> int:
        """How many requests wait."""
        ...

    def add(self, state: RequestState) -> None:
        """Takes a new request."""
        ...

    def remove(self, state: RequestState) -> None:
        """Ends a request that waits or runs; frees what it has."""
        ...

    def plan(self, max_steps: int) -> Plan:
        """The next step; without parts where nothing can be computed before results are read.

        Called with steps in flight: `computed` and `inflight` of each request count them. It changes neither: the engine
        does when the step is submitted. A part that decodes has `remaining` > 0.

        Args:
            max_steps: the most tokens that each part may choose.
        """
        ...


class PriorityScheduler(Configurable):
    """Continuous batching: every step decodes all requests that can, and fills up with chunks of prompts.

    Requests begin by priority, clients taking turns. Where the cache is full, the request of the lowest priority that came
    last loses its blocks, and is computed again later.
    """

    @node
    class Config(Configurable.Config["PriorityScheduler"]):
        """How steps are filled.

        Attributes:
            step_tokens: the most tokens of one step; None takes what the runner can do. Fewer make steps with prompts
                shorter, so that others' tokens come more evenly, and prompts slower.
            joint_prompt_tokens: how many tokens of prompts a step has before no further prompt joins it. Together prompts all wait
                for the longest; one after another the first ends sooner and the last as soon. Fewer than keep the
                processor busy waste it.
            preempt_for_priority: whether a request may take the place of one with a lower priority.
        """

        step_tokens: int | None = setting(default=None, ge=1)
        joint_prompt_tokens: int = setting(default=192, ge=1)
        preempt_for_priority: bool = True

    def __init__(self, cfg: Config, *, cache: Cache, limits: Limits):
        if cfg.step_tokens is not None and cfg.step_tokens < limits.rows:
            raise ConfigError(
                Problem(
                    path="scheduler.step_tokens",
                    message="a step has one token of each request that decodes",
                    got=str(cfg.step_tokens),
                    expected=f"at least {limits.rows}, as many as requests run",
                    fix="raise it, or lower the runner's max_rows",
                )
            )
        self.cache, self.limits = cache, limits
        self.budget = min(cfg.step_tokens or limits.step_tokens, limits.step_tokens)
        self.joint_prompt_tokens = cfg.joint_prompt_tokens
        self.preempts = cfg.preempt_for_priority
        self._running: list[RequestState] = []  # the first keep their blocks longest
        self.queue = WaitingQueue()

    @property
    def running(self) -> list[RequestState]:
        """See `Scheduler`."""
        return self._running

    def waiting(self) -> int:
        """See `Scheduler`."""
        return len(self.queue)

    def add(self, state: RequestState) -> None:
        """See `Scheduler`."""
        self.queue.push(state)

    def remove(self, state: RequestState) -> None:
        """See `Scheduler`."""
        if state.slot is None:
            self.queue.remove(state)
        else:
            self._running.remove(state)
            self.cache.end(state)

    def plan(self, max_steps: int) -> Plan:
        """See `Scheduler`."""
        plan = Plan()
        self._plan_decoding(plan)
        self._plan_new(plan, self._plan_prompts(plan))
        if max_steps > 1 and self._all_decode(plan):
            plan.steps = self._steps(plan, max_steps)
        return plan

    def _plan_decoding(self, plan: Plan) -> None:
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

    def _plan_prompts(self, plan: Plan) -> int:
        """Continues prompts that were begun. Returns how many tokens are left for others."""
        budget = self._prompt_budget(plan)
        for state in self._running:
            if budget <= 0:
                break
            if not state.decodes:
                budget -= self._plan_chunk(plan, state, budget)
        return budget

    def _prompt_budget(self, plan: Plan) -> int:
        decoding = sum(part.decodes for part in plan.parts)
        return min(self.budget - decoding, self.limits.prompt_tokens)

    def _plan_new(self, plan: Plan, budget: int) -> None:
        if plan.preemptions:
            return
        total = self._prompt_budget(plan)
        while budget > 0:
            state = self.queue.first()
            if state is None or state.inflight:  # its results say whether it goes on at all
                return
            if total - budget >= self.joint_prompt_tokens and not self._comes_first(state, plan):
                return
            match = self.cache.find(state)
            if match is None:
                return
            copies = self.cache.begin(state, match, headroom=len(self._running))
            if copies is None:
                if not self._make_room(state, plan):
                    return
                continue
            self.queue.take(state)
            bisect.insort(self._running, state, key=lambda s: s.order)
            plan.begun.append(state)
            plan.copies += copies
            budget -= self._plan_chunk(plan, state, budget)

    def _plan_chunk(self, plan: Plan, state: RequestState, budget: int) -> int:
        """Adds tokens of a prompt, whole chunks where there is room for one. Returns what they take of the budget."""
        chunk = self.limits.chunk
        room = budget // chunk * chunk or budget
        count = min(state.target - state.computed, room)
        last = state.computed + count == state.target
        plan.parts.append(Part(state, state.computed, count, last and state.remaining > 0, False))
        return 1 if count == 1 else -(-count // chunk) * chunk

    def _comes_first(self, state: RequestState, plan: Plan) -> bool:
        """Whether a request is of higher priority than a prompt in the step."""
        prompts = [part.state for part in plan.parts if not part.decodes]
        return any(state.request.priority < other.request.priority for other in prompts)

    def _make_room(self, state: RequestState, plan: Plan) -> bool:
        """Takes the place of the last running request for one of higher priority; False where none is lower."""
        if not (self.preempts and self._running) or self._running[-1].request.priority <= state.request.priority:
            return False
        victim = self._running[-1]
        plan.parts = [part for part in plan.parts if part.state is not victim]
        self._preempt(victim, plan)
        return True

    def _preempt(self, state: RequestState, plan: Plan) -> None:
        self._running.remove(state)
        self.cache.end(state)
        self.queue.push_front(state)
        plan.preemptions += 1

    def _all_decode(self, plan: Plan) -> bool:
        return bool(plan.parts) and all(part.decodes and not part.state.request.constraint for part in plan.parts)

    def _steps(self, plan: Plan, steps: int) -> int:
        """`steps`, where the cache has room and few of the tokens would be for nothing; else 1."""
        states = [part.state for part in plan.parts]
        useful = [min(state.remaining, steps) for state in states]
        if self.queue and min(useful) < steps:  # somebody waits for the first to end
            return 1
        if 2 * sum(useful) < steps * len(states):
            return 1
        if any(state.computed + steps > self.limits.positions for state in states):
            return 1
        return steps if all(self.cache.extend(state, state.computed + steps) for state in states) else 1
