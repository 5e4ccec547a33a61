"""Requests of a model with recurrent states continue from saved states, and outputs do not change."""

import random

import pytest

from axlearn_core.config import node, patch
from axlearn_core.errors import RequestError
from axlearn_plugins_serving.contracts import Request, Sampling
from axlearn_plugins_serving.disaggregated.handoff import check_transfers
from axlearn_plugins_serving.drafting import NgramDrafter
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.snapshots import Snapshots
from support.fake_runner import FakeRunner, expected

VOCABULARY = 97


class StateRunner(FakeRunner):
    """Tokens depend on a state, which a step reads from one row of a pool and writes to others."""

    @node
    class Config(FakeRunner.Config):
        num_snapshots: int = 4

    def __init__(self, cfg):
        super().__init__(cfg)
        self.num_snapshots = cfg.num_snapshots
        self.states = [None] * (self.max_rows + cfg.num_snapshots)

    def submit(self, rows, steps=1):
        # A step reads all states before it writes any.
        self.before = {row.slot: self._first_state(row) for row in rows}
        places = [place for row in rows for place in row.snapshots.values()]
        assert len(set(places)) == len(places)
        assert all(self.max_rows <= place < len(self.states) for place in places)
        return super().submit(rows, steps)

    def _first_state(self, row):
        return () if row.start == 0 else self.states[row.slot if row.state is None else row.state]

    def _compute(self, row, steps):
        self.row, self.state = row, list(self.before[row.slot])
        assert len(self.state) == row.start
        end = row.start + (len(row.tokens) or steps)
        for position in row.snapshots:
            assert position % self.block_size == 0
            assert not row.tokens or (position - row.start) % self.chunk == 0 or position == end
        result = super()._compute(row, steps)
        self.states[row.slot] = tuple(self.state)
        return result

    def _write(self, blocks, position, token):
        super()._write(blocks, position, token)
        assert position == len(self.state)
        self.state.append(token)
        if (place := self.row.snapshots.get(position + 1)) is not None:
            self.states[place] = tuple(self.state)

    def _read(self, blocks, length):
        tokens, version = super()._read(blocks, length)
        assert tokens == tuple(self.state[:length])
        return tokens, version


def serve(engine, requests, step=lambda: None):
    outputs, waiting = {}, list(requests)
    while waiting or engine.busy():
        if waiting:
            engine.add(waiting.pop(0))
        for output in engine.step():
            outputs.setdefault(output.id, []).extend(output.tokens)
        engine.cache.pool.check([s.blocks[s.freed :] for s in engine.scheduler.running])
        step()
    return outputs


def make_requests(seed, count=40):
    draw = random.Random(seed)
    start = [draw.randrange(VOCABULARY) for _ in range(30)]
    for index in range(count):
        prompt = start[: draw.choice([5, 12, 30])] + [draw.randrange(VOCABULARY) for _ in range(draw.choice([1, 3, 9]))]
        sampling = Sampling(temperature=0.0, max_tokens=draw.choice([1, 8, 20]), ignore_end=True)
        yield Request(id=str(index), prompt=tuple(prompt), sampling=sampling, priority=draw.choice([0, 0, -1]))


@pytest.mark.parametrize("num_snapshots", [0, 1, 4, 40])
@pytest.mark.parametrize("sizes", [{}, {"decode_steps": 3}, {"num_blocks": 20}, {"chunk": 8}], ids=str)
def test_tokens_do_not_depend_on_the_number_of_states(sizes, num_snapshots):
    runner = StateRunner.Config(num_snapshots=num_snapshots, **sizes).build()
    engine = ServingEngine.Config(hold_seconds=9.0).build(runner=runner)
    requests = list(make_requests(seed=num_snapshots))
    outputs = serve(engine, requests)
    for request in requests:
        tokens, _ = expected(request.prompt, request.sampling, max_context=runner.max_context, vocab_size=VOCABULARY)
        assert outputs[request.id] == tokens
    statistics = engine.statistics()
    assert statistics.used_blocks == 0
    assert statistics.preemptions > 0
    assert (statistics.cached_prompt_tokens > 0) == (num_snapshots > 0) or num_snapshots == 1


def test_the_next_turn_of_a_conversation_continues_from_the_last_output():
    runner = StateRunner.Config().build()
    engine = ServingEngine.Config().build(runner=runner)
    sampling = Sampling(temperature=0.0, max_tokens=12, ignore_end=True)
    prompt = tuple(range(10))
    first = serve(engine, [Request(id="a", prompt=prompt, sampling=sampling)])["a"]
    runner.computed = 0
    longer = (*prompt, *first, 1, 2)
    serve(engine, [Request(id="b", prompt=longer, sampling=sampling)])
    # 22 tokens of the first turn were computed except for the last; 5 blocks of 4 end within them.
    assert engine.statistics().cached_prompt_tokens == 20
    assert runner.computed == len(longer) - 20 + 11


def test_prompts_that_share_a_beginning_continue_after_it():
    runner = StateRunner.Config().build()
    engine = ServingEngine.Config().build(runner=runner)
    sampling = Sampling(temperature=0.0, max_tokens=1, ignore_end=True)
    shared = tuple(range(12))
    hits = []
    for index in range(3):
        serve(engine, [Request(id=str(index), prompt=(*shared, 50 + index, 1, 2, 3, 4, 5), sampling=sampling)])
        hits.append(engine.statistics().cached_prompt_tokens)
    # The second request finds the blocks of the beginning, but no state after them. It saves that state for the third.
    assert hits == [0, 0, 12]


def test_new_weights_forget_all_states():
    runner = StateRunner.Config().build()
    engine = ServingEngine.Config().build(runner=runner)
    sampling = Sampling(temperature=0.0, max_tokens=3, ignore_end=True)
    request = Request(id="a", prompt=tuple(range(10)), sampling=sampling)
    serve(engine, [request])
    engine.update_weights(1)
    outputs = serve(engine, [request])
    tokens, _ = expected(request.prompt, sampling, max_context=64, vocab_size=VOCABULARY, version=1)
    assert (outputs["a"], engine.statistics().cached_prompt_tokens) == (tokens, 0)


def test_a_drafter_is_refused():
    config = patch(ServingEngine.Config(), {"drafter": NgramDrafter.Config()})
    with pytest.raises(
        RequestError, match=r"recurrent layers cannot be served with a drafter(.*\n)+.*serving\.drafter=null"
    ):
        config.build(runner=StateRunner.Config().build())


def test_separate_prefill_is_refused():
    with pytest.raises(
        RequestError, match=r"prefill and decode cannot be separated(.*\n)+.*fix: serve it with replicas"
    ):
        check_transfers(ServingEngine.Config().build(runner=StateRunner.Config().build()))
    check_transfers(ServingEngine.Config().build(runner=FakeRunner.Config().build()))


def test_the_least_recently_used_state_is_replaced():
    snapshots = Snapshots(8, 2)
    for key in (b"a", b"b"):
        snapshots.register(key, snapshots.take())
    assert snapshots.find([b"a", b"b", b"c"]) == (2, 9)
    snapshots.use(b"a")
    assert snapshots.take() == 9, "b is older than a"
    assert snapshots.take() is None, "the planned step reads a"
    snapshots.submitted()
    assert snapshots.take() == 8
    assert snapshots.find([b"a", b"b"]) == (0, None)


def test_a_row_with_a_key_that_exists_is_released():
    snapshots = Snapshots(0, 2)
    first = snapshots.take()
    snapshots.register(b"a", first)
    snapshots.register(b"a", snapshots.take())
    assert snapshots.find([b"a"]) == (1, first)
    snapshots.discard(b"a")
    snapshots.discard(b"missing")
    assert {snapshots.take(), snapshots.take()} == {0, 1}
    snapshots.forget()
    assert snapshots.take() is None, "rows without a key belong to requests"
