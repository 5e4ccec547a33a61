"""Conformance suites for schedulers and drafters.

They do not run a model; every next token is random.
"""

import random
from typing import Any

import attrs
import pytest

from axlearn_core.config import Node
from axlearn_plugins_serving.blocks import BlockPool
from axlearn_plugins_serving.cache import Cache
from axlearn_plugins_serving.contracts import Request, Sampling
from axlearn_plugins_serving.request_state import RequestState
from axlearn_plugins_serving.scheduler import Limits, SchedulerOutput

BLOCK, VOCABULARY = 4, 5
"""Tokens per block, and a vocabulary small enough that prompts share prefixes."""
LIMITS = Limits(rows=4, step_tokens=20, prompt_tokens=16, chunk=4, positions=48)


class _Machine:
    """Drives a scheduler and its cache, and checks each plan."""

    def __init__(self, config: Node[Any], blocks: int, requests: int, *, max_steps: int):
        self.cache = Cache(BlockPool(blocks, BLOCK), LIMITS.rows)
        self.scheduler: Any = config.build(cache=self.cache, limits=LIMITS)
        self.rng, self.max_steps = random.Random(0), max_steps
        self.states = [self._state(index) for index in range(requests)]
        self.pending = list(self.states)
        for state in self.states:
            self.scheduler.add(state)

    def _state(self, index: int) -> RequestState:
        prompt = tuple(self.rng.randrange(VOCABULARY) for _ in range(self.rng.randint(1, 30)))
        request = Request(
            id=str(index), prompt=prompt, sampling=Sampling(), priority=self.rng.randint(0, 2), client=str(index % 3)
        )
        return RequestState(request, seed=0, arrival=index, limit=self.rng.randint(1, 12))

    def step(self) -> SchedulerOutput:
        """Plan a step, check it, and update the requests as an engine would."""
        plan = self.scheduler.plan(self.max_steps)
        self._check(plan)
        for part in plan.parts:
            state = part.state
            state.computed = part.start + part.count + (plan.steps - 1 if part.decodes else 0)
            self.cache.store(state)
            if not part.sample:
                continue
            room = state.remaining
            state.tokens += [self.rng.randrange(VOCABULARY) for _ in range(min(plan.steps, room))]
            if state.remaining <= 0:
                state.finished = True
                self.pending.remove(state)
                self.scheduler.remove(state)
        self.cache.pool.check([state.blocks for state in self.states])
        return plan

    def _check(self, plan: SchedulerOutput) -> None:
        states = [part.state for part in plan.parts]
        assert len({id(s) for s in states}) == len(states), "a request has two parts in one step"
        assert len(states) <= LIMITS.rows, f"a step has {len(states)} requests, but only {LIMITS.rows} can run"
        count = sum(part.count for part in plan.parts)
        assert count <= LIMITS.step_tokens, f"a step has {count} tokens, but the runner computes {LIMITS.step_tokens}"
        assert 1 <= plan.steps <= self.max_steps, (
            f"the plan has {plan.steps} steps, but at most {self.max_steps} are allowed"
        )
        assert plan.steps == 1 or all(part.decodes for part in plan.parts), "a plan with a prompt has several steps"
        slots = [s.slot for s in states]
        assert None not in slots, f"requests of a step have the slots {slots}"
        assert len(set(slots)) == len(slots), f"requests of a step have the slots {slots}"
        assert all(any(s is b for s in states) for b in plan.admitted), "a request starts without a part"
        assert self.scheduler.waiting() + len(self.scheduler.running) == len(self.pending), "a request is lost"
        for part in plan.parts:
            state, end = part.state, part.start + part.count + (plan.steps - 1 if part.decodes else 0)
            assert not state.finished, "a finished request is computed"
            assert part.start == state.computed, f"starts at {part.start}, but {state.computed} positions are computed"
            assert part.count >= 1, "a part has no tokens"
            assert part.decodes == (part.start >= state.target), (
                "a prompt is decoded, or an output is treated as a prompt"
            )
            assert not part.decodes or (part.count == 1 and part.sample), (
                "a decoding part must choose exactly one token"
            )
            assert part.decodes or end <= state.target, "a part computes more than the prompt"
            assert part.sample == (end >= state.target and state.remaining > 0), "a part samples at the wrong position"
            assert end <= len(state.blocks) * BLOCK, (
                f"{end} positions do not fit in {len(state.blocks)} blocks of {BLOCK}"
            )


class SchedulerSuite:
    """Conformance tests for a scheduler.

    The scheduler must compute each request once, in order and within the limits, and finish all of them.

    Attributes:
        config: Config of the scheduler.
        steps: Number of steps without a finished request after which the suite fails.
    """

    config: Node[Any]
    steps: int = 400

    @pytest.mark.parametrize("max_steps", [1, 3])
    @pytest.mark.parametrize("blocks", [13, 60], ids=["scarce", "plenty"])
    def test_every_request_is_computed_within_the_limits(self, blocks: int, max_steps: int) -> None:
        """Run forty requests from three clients, with three priority levels.

        One cache is large, and one is too small for four requests.
        """
        machine, idle = _Machine(self.config, blocks, 40, max_steps=max_steps), 0
        while machine.pending:
            before = len(machine.pending)
            machine.step()
            idle = 0 if len(machine.pending) < before else idle + 1
            assert idle < self.steps, f"{len(machine.pending)} requests are never computed"
        assert machine.scheduler.waiting() == 0
        assert not machine.scheduler.running
        assert machine.cache.pool.used == 0

    def test_requests_may_leave_at_any_time(self) -> None:
        """Remove waiting and running requests, as if their clients had left."""
        machine, rng = _Machine(self.config, 20, 30, max_steps=1), random.Random(1)
        while machine.pending:
            machine.step()
            if machine.pending and rng.random() < 0.5:
                state = machine.pending.pop(rng.randrange(len(machine.pending)))
                state.finished = True
                machine.scheduler.remove(state)
        assert machine.cache.pool.used == 0

    def test_nothing_is_planned_where_nothing_waits(self) -> None:
        """Plan without requests."""
        assert not _Machine(self.config, 20, 0, max_steps=1).step().parts


class DrafterSuite:
    """Conformance tests for a drafter.

    The drafter must respect `most`, be deterministic and not change requests.

    Attributes:
        config: Config of the drafter.
    """

    config: Node[Any]

    def _drafts(self, most: int) -> list[tuple[int, ...]]:
        drafter, rng, drafts = self.config.build(), random.Random(2), []
        for arrival in range(8):
            prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20)))
            state = RequestState(Request(id=str(arrival), prompt=prompt), seed=0, arrival=arrival, limit=20)
            for _ in range(20):
                state.drafts = tuple(rng.randrange(VOCABULARY) for _ in range(4))
                before = list(state.tokens), attrs.asdict(state.request)
                drafts.append(tuple(drafter.draft(state, most)))
                assert (state.tokens, attrs.asdict(state.request)) == before, "the drafter changed the request"
                state.tokens.append(rng.randrange(VOCABULARY))
        return drafts

    @pytest.mark.parametrize("most", [1, 3])
    def test_drafts_are_tokens_and_no_more_than_asked_for(self, most: int) -> None:
        """Check that drafts are valid token ids."""
        for draft in self._drafts(most):
            assert len(draft) <= most, f"{len(draft)} tokens were drafted, but at most {most} are allowed"
            assert all(token >= 0 and token == int(token) for token in draft), f"not token ids: {draft}"

    def test_something_is_drafted(self) -> None:
        """Draft for requests that repeat n-grams, because their vocabulary has only five tokens."""
        assert any(self._drafts(3)), "the drafter drafts nothing for any request"

    def test_equal_requests_have_equal_drafts(self) -> None:
        """Draft twice for the same requests."""
        assert self._drafts(3) == self._drafts(3), "drafts differ between two engines"
