"""Drafts change the number of steps of an output but not the output."""

import random

import pytest

from axlearn_core.errors import RequestError
from axlearn_plugins_serving.contracts import Request, Sampling
from axlearn_plugins_serving.drafting import ModelDrafter, NgramDrafter
from axlearn_plugins_serving.request_state import RequestState
from support import fake_runner
from support.engine_runs import END, engine, requests_at_random, run, tokens
from support.fake_runner import expected

DRAFTS = {"drafter": NgramDrafter.Config(ngram=2, length=5), "adapt_drafting": False}


@pytest.fixture
def repetitive(monkeypatch):
    """Tokens that depend on few earlier tokens, so that texts repeat themselves."""
    hashed = fake_runner._hash
    monkeypatch.setattr(fake_runner, "_hash", lambda version, tokens, salt=b"": hashed(version, tokens[-2:], salt) % 5)


@pytest.mark.parametrize("sizes", [{}, {"num_blocks": 17}, {"max_step_tokens": 9}, {"chunk": 8, "max_step_tokens": 30}])
def test_random_requests_get_what_they_get_alone(sizes, repetitive):
    rng = random.Random(0)
    one = engine(settings=DRAFTS, **sizes)
    requests = requests_at_random(rng, 120)
    outputs = run(one, requests, aborted={"5", "17", "40"}, rng=rng)
    for request in requests:
        result_tokens = outputs.get(request.id, [])
        want, reason = expected(
            request.prompt, request.sampling, max_context=64, vocab_size=97, end_tokens=END, seed=request.sampling.seed
        )
        if request.id not in {"5", "17", "40"}:
            assert (tokens(result_tokens), result_tokens[-1].finish) == (want, reason)
    statistics = one.statistics()
    assert statistics.accepted_tokens > 40
    assert statistics.used_blocks == 0


def test_fewer_steps_and_the_same_log_probabilities(repetitive):
    sampling = Sampling(temperature=0.0, max_tokens=50, ignore_end=True, logprobs=2)
    request = Request(id="a", prompt=(1, 2, 3), sampling=sampling)
    plain, drafting = engine(), engine(settings=DRAFTS)
    want, drafted = run(plain, [request])["a"], run(drafting, [request])["a"]
    assert tokens(want) == tokens(drafted)
    assert drafting.statistics().steps < plain.statistics().steps / 2
    top = [[p.top for o in outputs for p in o.logprobs] for outputs in (want, drafted)]
    assert top[0] == top[1]
    assert len(top[1]) == 50


def test_wrong_drafts_are_not_taken():
    one = engine(settings={"drafter": NgramDrafter.Config(ngram=1), "adapt_drafting": False}, end=frozenset())
    sampling = Sampling(temperature=0.0, max_tokens=30)
    prompt = tuple(range(30))  # drafts are hardly ever right
    want, _ = expected(prompt, sampling, max_context=64, vocab_size=97)
    assert tokens(run(one, [Request(id="a", prompt=prompt, sampling=sampling)])["a"]) == want
    assert one.statistics().drafted_tokens > one.statistics().accepted_tokens


def test_what_follows_equal_tokens_is_drafted():
    drafter = DRAFTS["drafter"].build()
    state = RequestState(Request(id="a", prompt=(1, 2, 3, 4, 1, 2)), seed=0, arrival=0, limit=9)
    assert list(drafter.draft(state, 9)) == [3, 4, 1, 2]
    assert list(drafter.draft(state, 1)) == [3]
    state.tokens += [9, 1, 2]
    assert list(drafter.draft(state, 9)) == [9, 1, 2]
    state.tokens += [7]
    assert list(drafter.draft(state, 9)) == []


def test_a_runner_without_heads_cannot_be_used_with_the_model_drafter():
    message = r"does not draft tokens.*\n *got: .*a FakeRunner without drafts\n *fix: set serving.runner.drafts=true"
    with pytest.raises(RequestError, match=message):
        engine(settings={"drafter": ModelDrafter.Config()})


def test_the_model_drafter_drafts_what_the_last_step_returned():
    state = RequestState(Request(id="a", prompt=(1, 2)), seed=0, arrival=0, limit=9)
    state.drafts = (5, 6, 7)
    assert ModelDrafter.Config().build().draft(state, 9) == (5, 6, 7)
    assert ModelDrafter.Config().build().draft(state, 2) == (5, 6)
    assert ModelDrafter.Config(length=1).build().draft(state, 9) == (5,)
