"""The property `paged-decode`: it holds for sound configs, and finds faults of the engine."""

import numpy as np
import pytest

from axlearn_core.errors import ConfigError, Problem
from axlearn_plugins_serving import cache
from axlearn_plugins_serving.cache import Cache
from axlearn_plugins_serving.contracts import Request, TokenLogprobs
from axlearn_plugins_serving.paged_cache_feature import UsePagedCache
from axlearn_plugins_serving.prove_paged import Answer, PagedDecoding, compare_answer, list_requests
from axlearn_plugins_serving.snapshots import Snapshots
from support import proof_cases

SMALL = ("model.decoder.hidden_dim=16", "input.sequence_length=16", "input.batch_size=4")


def case(*features, settings=()):
    return proof_cases.case("quickstart", features, (*SMALL, *settings))


def check(proof_case):
    assert PagedDecoding().skip_reason(proof_case) is None
    return PagedDecoding().check(proof_case)


@pytest.mark.slow
@pytest.mark.parametrize("features", [(), ("rope",), ("moe",), ("mla",), ("precision:dtype=bfloat16",)], ids=str)
def test_the_engine_gives_the_logits_of_the_forward_pass(features):
    outcome = check(case(*features))
    assert outcome.holds, outcome
    assert "4 shared tokens and 1 preempted" in outcome.compared


@pytest.mark.slow
@pytest.mark.parametrize("features", [("gated-delta-net",), ("mamba2:head_dim=8",)], ids=str)
def test_requests_of_a_recurrent_model_share_a_state(features):
    outcome = check(case(*features))
    assert outcome.holds, outcome
    assert "8 shared tokens and 1 preempted" in outcome.compared


@pytest.mark.slow
def test_a_shared_prefix_without_its_state_is_found(monkeypatch):
    original = Snapshots.find
    monkeypatch.setattr(Snapshots, "find", lambda self, keys: (original(self, keys)[0], None))
    outcome = check(case("gated-delta-net"))
    assert not outcome.holds, outcome
    assert "token 1 after the prompt of 10 tokens" in outcome.difference.detail


def ignore_contents(monkeypatch):
    """Share blocks by their positions, whatever tokens they contain."""
    original = cache.block_keys
    monkeypatch.setattr(
        cache, "block_keys", lambda root, tokens, size, prefix: original(root, [0] * len(tokens), size, prefix=prefix)
    )


def lose_preempted_tokens(monkeypatch):
    """Begin a preempted request as if all its tokens were in the cache."""
    original = Cache.begin

    def begin(self, state, match, *, headroom=0):
        copies = original(self, state, match, headroom=headroom)
        if copies is not None and state.output:
            state.computed = len(state.tokens) - 1
        return copies

    monkeypatch.setattr(Cache, "begin", begin)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "place"),
    [
        (lose_preempted_tokens, "after the prompt of 2 tokens, preempted"),
        (ignore_contents, "token 1 after the prompt of 8 tokens"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_fault_of_the_engine_is_found(plant, place, monkeypatch):
    plant(monkeypatch)
    outcome = check(case())
    assert not outcome.holds, outcome
    assert outcome.difference.layer == "engine"
    assert outcome.difference.tensor == "logits"
    assert place in outcome.difference.detail


@pytest.mark.parametrize(
    ("features", "settings", "reason"),
    [
        ((), ("model.decoder.layer.attention.causal=false",), "the model is bidirectional"),
        (("moe:dispatch={type: capacity-dispatch}",), (), "CapacityDispatch lets the tokens"),
    ],
)
def test_a_model_that_cannot_be_served_says_why(features, settings, reason):
    assert reason in PagedDecoding().skip_reason(case(*features, settings=settings))


def test_short_rows_are_skipped():
    short = proof_cases.case("quickstart", (), ("input.sequence_length=4",))
    assert "rows of 4 tokens are too short" in PagedDecoding().skip_reason(short)


def test_a_model_without_caches_cannot_be_served(monkeypatch):
    def refuse(self, cfg):
        raise ConfigError(Problem(path="model", message="paged-cache found no attention layer with a cache"))

    monkeypatch.setattr(UsePagedCache, "apply", refuse)
    assert "cannot be served: model: paged-cache found no" in PagedDecoding().skip_reason(case())


def test_prompts_differ_in_length_and_share_a_prefix():
    first, second, third, last = (request.prompt for request in list_requests(case()))
    assert len({len(p) for p in (first, second, third, last)}) == 4
    assert first[:4] == second[:4]
    assert first[4:8] != second[4:8]


def logprobs(token, logits):
    exact = logits - np.logaddexp.reduce(logits)
    return TokenLogprobs(token=token, logprob=float(exact[token]), top=())


LOGITS = np.array([[0.0, 1.0, 2.0], [0.0, 3.0, 1.0], [5.0, 1.0, 0.0]])
REQUEST = Request(id="a", prompt=(1,))


def test_an_answer_that_equals_the_forward_pass_has_no_error():
    answer = Answer(tokens=[2, 1], logprobs=[logprobs(2, LOGITS[0]), logprobs(1, LOGITS[1])])
    assert max(d.error for d in compare_answer(REQUEST, answer, LOGITS, 1.0)) == 0


def test_another_token_and_missing_tokens_are_errors():
    answer = Answer(tokens=[1], logprobs=[logprobs(1, LOGITS[0])])
    exact, token, missing = compare_answer(REQUEST, answer, LOGITS, 1.0)
    assert exact.error == 0
    assert token.error == pytest.approx(0.5)
    assert "prefers 2" in token.detail
    assert missing.error == np.inf
    assert "1 of 2 tokens" in missing.detail
