"""The suites for schedulers and drafters: shipped ones pass, and broken ones fail."""

import random

import attrs
import pytest

from axlearn_core.config import node
from axlearn_plugins_serving.drafting import NgramDrafter
from axlearn_plugins_serving.scheduler import PriorityScheduler
from axlearn_plugins_serving.testing import DrafterSuite, SchedulerSuite


class TestPriorityScheduler(SchedulerSuite):
    config = PriorityScheduler.Config()


class TestSmallSteps(SchedulerSuite):
    config = PriorityScheduler.Config(step_tokens=7, preempt_for_priority=False)


class TestNgramDrafter(DrafterSuite):
    config = NgramDrafter.Config(ngram=2)


class Forgetful(PriorityScheduler):
    @node
    class Config(PriorityScheduler.Config):
        pass

    def add(self, state):
        if state.arrival != 7:
            super().add(state)


class Starving(PriorityScheduler):
    @node
    class Config(PriorityScheduler.Config):
        pass

    def plan(self, max_steps):
        plan = super().plan(max_steps)
        plan.parts = [part for part in plan.parts if part.state.arrival != 7 or part.state in plan.admitted]
        return plan


class Twice(PriorityScheduler):
    @node
    class Config(PriorityScheduler.Config):
        pass

    def plan(self, max_steps):
        plan = super().plan(max_steps)
        plan.parts += plan.parts[:1]
        return plan


class Greedy(PriorityScheduler):
    @node
    class Config(PriorityScheduler.Config):
        pass

    def _plan_chunk(self, plan, state, budget):
        return super()._plan_chunk(plan, state, 100)


class Careless(PriorityScheduler):
    @node
    class Config(PriorityScheduler.Config):
        pass

    def plan(self, max_steps):
        plan = super().plan(max_steps)
        plan.parts = [attrs.evolve(part, start=max(0, part.start - 1)) for part in plan.parts]
        return plan


class Leaking(PriorityScheduler):
    @node
    class Config(PriorityScheduler.Config):
        pass

    def remove(self, state):
        if state.slot is None:
            super().remove(state)
        else:
            self._running.remove(state)


@pytest.mark.parametrize("mutant", [Forgetful, Starving, Twice, Greedy, Careless, Leaking])
def test_a_scheduler_that_breaks_a_rule_is_found(mutant):
    suite = type("Suite", (SchedulerSuite,), {"config": mutant.Config(), "steps": 100})()
    with pytest.raises(AssertionError):
        suite.test_every_request_is_computed_within_the_limits(60, 1)


class Long(NgramDrafter):
    @node
    class Config(NgramDrafter.Config):
        pass

    def draft(self, state, most):
        return super().draft(state, most + 1)


class Moody(NgramDrafter):
    @node
    class Config(NgramDrafter.Config):
        pass

    def draft(self, state, most):
        return [random.randrange(5)]


class Meddling(NgramDrafter):
    @node
    class Config(NgramDrafter.Config):
        pass

    def draft(self, state, most):
        state.tokens.append(0)
        return ()


@pytest.mark.parametrize("mutant", [Long, Moody, Meddling])
def test_a_drafter_that_breaks_a_rule_is_found(mutant):
    suite = type("Suite", (DrafterSuite,), {"config": mutant.Config(ngram=1)})()

    def run():
        suite.test_drafts_are_tokens_and_no_more_than_asked_for(1)
        suite.test_equal_requests_have_equal_drafts()

    with pytest.raises(AssertionError):
        run()
