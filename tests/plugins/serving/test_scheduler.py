"""Scheduling: priorities, turns of clients, preemption, and invariants under any order of calls."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from axlearn_core.config import patch
from axlearn_core.errors import ConfigError
from axlearn_plugins_serving.contracts import Request, Sampling
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.request_state import RequestState
from axlearn_plugins_serving.waiting_queue import WaitingQueue
from support.fake_runner import FakeRunner, expected

GREEDY = Sampling(temperature=0.0, max_tokens=4, ignore_end=True)


def engine(changes=(), **sizes):
    return patch(ServingEngine.Config(), dict(changes)).build(runner=FakeRunner.Config(**sizes).build())


def order_of_ends(one, requests):
    for request in requests:
        one.add(request)
    ended = []
    while one.busy():
        ended += [output.id for output in one.step() if output.finish]
    return ended


def request(id, **fields):
    return Request(**{"id": id, "prompt": (len(id), ord(id[0]) % 90, 7), "sampling": GREEDY, **fields})


def state(id, arrival, **fields):
    return RequestState(request(id, **fields), seed=0, arrival=arrival, limit=1)


def test_smaller_priorities_go_first():
    one = engine(max_rows=1, max_step_tokens=8)
    assert order_of_ends(one, [request("a", priority=1), request("b"), request("c", priority=-1)]) == ["c", "b", "a"]


def test_clients_take_turns():
    one = engine(max_rows=1, max_step_tokens=8)
    requests = [request(f"a{i}", client="a") for i in range(3)] + [request(f"b{i}", client="b") for i in range(2)]
    assert order_of_ends(one, requests) == ["a0", "b0", "a1", "b1", "a2"]


def test_a_request_takes_the_place_of_one_of_lower_priority():
    one = engine(max_rows=1, max_step_tokens=8)
    one.add(request("slow", priority=5, sampling=Sampling(temperature=0.0, max_tokens=30, ignore_end=True)))
    for _ in range(6):
        one.step()
    assert order_of_ends(one, [request("quick")]) == ["quick", "slow"]
    assert one.statistics().preemptions == 1
    patient = engine({"scheduler.preempt_for_priority": False}, max_rows=1, max_step_tokens=8)
    patient.add(request("slow", priority=5))
    patient.step()
    assert order_of_ends(patient, [request("quick")]) == ["slow", "quick"]


def test_who_came_last_loses_its_blocks_first():
    one = engine(num_blocks=8, max_blocks_per_request=8, max_rows=3)
    long = Sampling(temperature=0.0, max_tokens=13, ignore_end=True)
    assert order_of_ends(one, [request(i, sampling=long) for i in "abc"])[0] == "a"
    assert one.statistics().preemptions


def test_prompts_do_not_keep_others_from_decoding():
    one = engine(max_rows=3, max_step_tokens=8)
    one.add(request("a", sampling=Sampling(temperature=0.0, max_tokens=30, ignore_end=True)))
    one.step()
    one.step()
    one.add(Request(id="long", prompt=tuple(range(50)), sampling=GREEDY))
    for _ in range(6):
        assert [o.id for o in one.step()] == ["a"]
    assert all(tokens <= 8 for tokens, _, _ in one.runner.steps)


@pytest.mark.parametrize(("joint", "tokens"), [(20, [20, 31]), (21, [50])])
def test_a_prompt_joins_a_step_that_has_few_tokens_of_prompts(joint, tokens):
    one = engine({"scheduler.joint_prompt_tokens": joint}, max_rows=4, max_step_tokens=64)
    for id, prompt in (("first", range(20)), ("second", range(40, 70))):
        one.add(Request(id=id, prompt=tuple(prompt), sampling=GREEDY))
    one.step()
    one.step()
    assert [step[0] for step in one.runner.steps][: len(tokens)] == tokens


def test_a_prompt_of_higher_priority_does_not_wait_for_others():
    one = engine({"scheduler.joint_prompt_tokens": 10}, max_rows=4, max_step_tokens=40)
    one.add(Request(id="long", prompt=tuple(range(50)), sampling=GREEDY, priority=1))
    one.step()
    one.add(Request(id="same", prompt=tuple(range(60, 65)), sampling=GREEDY, priority=1))
    one.add(Request(id="higher", prompt=tuple(range(70, 75)), sampling=GREEDY))
    one.step()
    assert {state.request.id for state in one.scheduler.running} == {"long", "higher"}


def test_steps_that_are_too_small_are_refused():
    with pytest.raises(ConfigError, match="at least 6"):
        engine({"scheduler.step_tokens": 3})


@pytest.mark.parametrize(("max_tokens", "started"), [(5, 8), (6, 4)])
def test_only_requests_that_may_grow_need_more_free_blocks(max_tokens, started):
    one = engine(max_rows=8, max_step_tokens=24, block_size=8, num_blocks=8)
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_end=True)
    for i in range(8):  # a prompt of three tokens and five more fill a block
        one.add(request(str(i), prompt=(i, 40 + i, 7), sampling=sampling))
    one.step()
    assert len(one.scheduler.running) == started


def test_a_request_that_lost_its_place_comes_before_others():
    queue = WaitingQueue()
    states = [state(i, n, client=c) for n, (i, c) in enumerate([("a", "x"), ("b", "x"), ("c", "y")])]
    for one in states[1:]:
        queue.push(one)
    queue.push_front(states[0])
    order = []
    while (first := queue.first()) is not None:
        queue.take(first)
        order.append(first.request.id)
    assert order == ["a", "c", "b"]
    assert len(queue) == 0


def test_removing_from_the_queue():
    queue, rng = WaitingQueue(), random.Random(0)
    states = [state(str(i), i, client=rng.choice("abc"), priority=rng.randrange(3)) for i in range(60)]
    for one in states:
        queue.push(one)
    for one in rng.sample(states, 40):
        queue.remove(one)
        assert one not in queue
    assert len(queue) == 20
    removed = []
    while (first := queue.first()) is not None:
        queue.take(first)
        removed.append(first)
    assert [s.request.priority for s in removed] == sorted(s.request.priority for s in removed)
    assert len(removed) == 20


class Calls(RuleBasedStateMachine):
    """Requests arrive and leave in any order, no block is lost, and outputs do not change."""

    def __init__(self):
        super().__init__()
        self.engine = engine(
            {"hold_seconds": 9.0},
            num_blocks=14,
            max_blocks_per_request=10,
            max_rows=4,
            max_step_tokens=10,
            decode_steps=3,
        )
        self.engine.meter._token_seconds = 0.0
        self.requests, self.outputs, self.version, self.count = {}, {}, 0, 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=30),
        count=st.integers(0, 20),
        priority=st.integers(-1, 1),
        logprobs=st.booleans(),
    )
    def add(self, prompt, count, priority, logprobs):
        sampling = Sampling(temperature=0.0, max_tokens=count, ignore_end=True, prompt_logprobs=logprobs)
        added = Request(id=str(self.count), prompt=tuple(prompt), sampling=sampling, priority=priority)
        self.count += 1
        self.engine.add(added)
        self.requests[added.id], self.outputs[added.id] = added, []

    @rule(index=st.integers(0, 100))
    def abort(self, index):
        if self.requests:
            id = list(self.requests)[index % len(self.requests)]
            self.engine.abort(id)
            del self.requests[id]

    @rule(count=st.integers(1, 8))
    def step(self, count):
        for _ in range(count):
            for output in self.engine.step():
                self.outputs[output.id] += output.tokens
                if output.finish:
                    self.check(self.requests.pop(output.id), output)

    def check(self, request, output):
        want = expected(request.prompt, request.sampling, max_context=self.engine.max_context, vocab_size=97)
        assert (self.outputs[request.id], output.finish) == want

    @invariant()
    def no_block_is_lost(self):
        running = self.engine.scheduler.running
        self.engine.cache.pool.check([s.blocks[s.freed :] for s in running])
        assert len({s.slot for s in running}) == len(running)
        assert self.engine.cache.free_slots + len(running) == 4

    def teardown(self):
        while self.engine.busy():
            self.step(1)
        assert not self.requests
        assert self.engine.statistics().used_blocks == 0
        assert not self.engine.cache._announced


TestCalls = Calls.TestCase
TestCalls.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
