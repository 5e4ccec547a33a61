"""`min_tokens` and `bad_tokens`: the masks, and outputs of requests that run together, are preempted or draft."""

import random

import attrs
import numpy as np
import pytest

from axlearn_plugins_serving.contracts import Request, Sampling
from axlearn_plugins_serving.drafting import NgramDrafter
from axlearn_plugins_serving.request_state import RequestState
from axlearn_plugins_serving.token_masks import next_mask
from support.engine_runs import CONTEXT, END, VOCABULARY, engine, requests_at_random, run, tokens
from support.fake_runner import expected


class Only:
    """A constraint that always allows the same tokens."""

    def __init__(self, *allowed):
        self.allowed = allowed

    def mask(self):
        bits = np.zeros((64,), bool)
        bits[list(self.allowed)] = True
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token):
        return False


def allowed_tokens(sampling, output=(), constraint=None, inflight=0):
    state = RequestState(
        Request(id="a", prompt=(7, 8), sampling=sampling, constraint=constraint), seed=0, arrival=0, limit=9
    )
    state.tokens += output
    state.inflight = inflight
    mask = next_mask(state, frozenset({3, 4}), 64)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_tokens_that_end_the_output_are_masked_until_the_minimum():
    sampling, every = Sampling(min_tokens=3, stop_tokens=frozenset({40})), set(range(64))
    assert allowed_tokens(sampling, [9, 9]) == every - {3, 4, 40}
    assert allowed_tokens(sampling, [9], inflight=1) == every - {3, 4, 40}
    assert allowed_tokens(sampling, [9, 9], inflight=1) == every
    assert allowed_tokens(attrs.evolve(sampling, ignore_end=True)) == every - {40}


def test_the_last_token_of_a_bad_sequence_is_masked_after_the_others():
    sampling, every = Sampling(bad_tokens=((5,), (1, 2), (1, 1, 63))), set(range(64))
    assert allowed_tokens(sampling) == every - {5}
    assert allowed_tokens(sampling, [1]) == every - {5, 2}
    assert allowed_tokens(sampling, [9, 1, 1]) == every - {5, 2, 63}
    assert allowed_tokens(Sampling(bad_tokens=((8, 2),))) == every  # the prompt ends with 8


def test_a_constraint_that_allows_nothing_else_wins():
    sampling = Sampling(min_tokens=3, bad_tokens=((5,),))
    assert allowed_tokens(sampling, constraint=Only(3, 6)) == {6}
    assert allowed_tokens(sampling, constraint=Only(3, 5)) == {3, 5}


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, {}),
        ({}, {"num_blocks": 17, "decode_steps": 4}),
        ({"drafter": NgramDrafter.Config(ngram=1)}, {"chunk": 8, "max_step_tokens": 30}),
        ({"pipeline": False}, {"max_step_tokens": 9}),
    ],
)
def test_random_requests_get_what_they_get_alone(settings, sizes):
    rng = random.Random(0)
    one = engine(settings=settings, **sizes)
    requests = []
    for request in requests_at_random(rng, 80):
        most = request.sampling.max_tokens or 9
        words = [*((token,) for token in range(5, 90)), (90, 91), (91, 92, 93), (93, 93)]
        some = tuple(words) if rng.random() < 0.3 else ()
        sampling = attrs.evolve(request.sampling, min_tokens=rng.randint(0, min(9, most)), bad_tokens=some)
        requests.append(attrs.evolve(request, sampling=sampling))
    outputs = run(one, requests, rng=rng)
    for request in requests:
        want, reason = expected(
            request.prompt,
            request.sampling,
            max_context=CONTEXT,
            vocab_size=VOCABULARY,
            end_tokens=END,
            seed=request.sampling.seed,
        )
        assert (tokens(outputs[request.id]), outputs[request.id][-1].finish) == (want, reason)
    assert one.statistics().used_blocks == 0
