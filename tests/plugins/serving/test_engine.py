"""A request gets the same tokens alone and together with any other requests."""

import gc
import random
import sys

import numpy as np
import pytest

from axlearn_core.errors import RequestError
from axlearn_plugins_serving import measure
from axlearn_plugins_serving.contracts import QueueFullError, Request, Sampling
from support import fake_runner
from support.engine_runs import CONTEXT, END, VOCABULARY, check_blocks, engine, requests_at_random, run, tokens
from support.fake_runner import expected, logprobs_of

ENGINES = {
    "roomy": {},
    "several-steps": {"decode_steps": 4},
    "few-blocks": {"num_blocks": 17, "decode_steps": 2},
    "small-steps": {"max_step_tokens": 7, "max_rows": 5},
    "chunks": {"max_step_tokens": 22, "chunk": 8},
    "one-row": {"max_rows": 1, "max_step_tokens": 3},
    "large-blocks": {"block_size": 16, "num_blocks": 9, "max_blocks_per_request": 4},
    "blocks-of-one": {"block_size": 1, "num_blocks": 130, "max_blocks_per_request": 64},
}
SETTINGS = {
    "default": {},
    "alone": {"pipeline": False, "prefix_cache": False},
    "no-prefixes": {"prefix_cache": False},
    "at-once": {"pipeline": False},
    "no-priority": {"scheduler.preempt_for_priority": False},
}


@pytest.mark.fast_cases(
    "chunks-at-once",
    "chunks-no-prefixes",
    "few-blocks-no-priority",
    "roomy-alone",
    "several-steps-alone",
    "small-steps-alone",
)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("sizes", ENGINES)
def test_random_requests_get_what_they_get_alone(sizes, settings):
    rng = random.Random(f"{sizes}{settings}")
    one = engine(settings=SETTINGS[settings], **ENGINES[sizes])
    requests = requests_at_random(rng, 120)
    aborted = {r.id for r in rng.sample(requests, 15)}
    outputs = run(one, requests, aborted=aborted, rng=rng)
    finished = 0
    for request in requests:
        result_tokens = outputs.get(request.id, [])
        want, reason = expected(
            request.prompt, request.sampling, max_context=one.max_context, vocab_size=VOCABULARY, end_tokens=END,
            seed=request.sampling.seed,
        )  # fmt: skip
        if result_tokens and result_tokens[-1].finish:
            assert (tokens(result_tokens), result_tokens[-1].finish) == (want, reason), request
            finished += 1
        else:
            assert request.id in aborted
            assert tokens(result_tokens) == want[: len(tokens(result_tokens))]
    assert finished >= len(requests) - len(aborted)
    statistics = one.statistics()
    assert (statistics.waiting, statistics.running, statistics.used_blocks) == (0, 0, 0)
    assert sizes != "few-blocks" or statistics.preemptions > 5
    if SETTINGS[settings].get("prefix_cache", True):
        assert statistics.cached_prompt_tokens > 0
    else:
        assert statistics.cached_prompt_tokens == 0


def test_a_wrong_table_would_be_noticed():
    one = engine(num_blocks=18)
    one.cache.pool.set_content = lambda block, key: type(one.cache.pool).set_content(one.cache.pool, block ^ 1, key)
    requests = requests_at_random(random.Random(1), 40)
    outputs = run(one, requests, check=False)
    wrong = 0
    for request in requests:
        want, _ = expected(
            request.prompt, request.sampling, max_context=64, vocab_size=97, end_tokens=END, seed=request.sampling.seed
        )
        wrong += tokens(outputs[request.id]) != want
    assert wrong


def test_log_probabilities_of_prompt_and_output():
    rng = random.Random(5)
    for settings in ({}, {"scheduler.step_tokens": 6}):
        one = engine(settings=settings, num_blocks=20)
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(21))
        sampling = Sampling(temperature=0.0, max_tokens=9, ignore_end=True, logprobs=3, prompt_logprobs=True)
        requests = [
            Request(id=str(i), prompt=prompt[: 21 - i // 2], sampling=sampling, priority=-i // 3) for i in range(8)
        ]
        outputs = run(one, requests, rng=rng)
        for request in requests:
            output, prompt = outputs[request.id], request.prompt
            want = tuple(logprobs_of(prompt[:i], prompt[i], 3) for i in range(1, len(prompt)))
            assert output[0].prompt_logprobs == want
            assert all(o.prompt_logprobs is None for o in output[1:])
            text = prompt + tuple(tokens(output))
            want = [logprobs_of(text[:i], text[i], 3) for i in range(len(prompt), len(text))]
            assert [p for o in output for p in o.logprobs] == want
    assert one.statistics().preemptions


def test_a_prompt_alone_is_scored_up_to_the_whole_context():
    one = engine()
    prompt = tuple(random.Random(2).randrange(VOCABULARY) for _ in range(CONTEXT))
    sampling = Sampling(max_tokens=0, prompt_logprobs=True, logprobs=0)
    (output,) = run(one, [Request(id="a", prompt=prompt, sampling=sampling)])["a"]
    assert (output.tokens, output.finish, len(output.prompt_logprobs)) == ((), "length", CONTEXT - 1)
    (output,) = run(one, [Request(id="a", prompt=prompt, sampling=Sampling(max_tokens=0))])["a"]
    assert (output.finish, output.cached_tokens, output.prompt_logprobs) == ("length", CONTEXT - 1, None)


def test_samples_of_one_prompt_compute_it_once():
    for length in (13, 16, 17, 2):
        one = engine(num_blocks=64, max_step_tokens=32)
        prompt = tuple(random.Random(length).randrange(VOCABULARY) for _ in range(length))
        requests = [
            Request(id=str(i), prompt=prompt, sampling=Sampling(seed=i, max_tokens=5, ignore_end=True))
            for i in range(6)
        ]
        for request in requests:
            one.add(request)
        outputs = run(one, [])
        assert (
            one.runner.computed <= length + 5 + 6 * 4 + 1
        )  # the prompt once, then its last token and four more for each
        assert len({tuple(tokens(o)) for o in outputs.values()}) == 6
        for request in requests:
            want, _ = expected(prompt, request.sampling, max_context=64, vocab_size=97, seed=request.sampling.seed)
            assert tokens(outputs[request.id]) == want


def test_new_weights_are_used_and_old_blocks_are_not():
    one, rng = engine(num_blocks=30), random.Random(3)
    prompt = tuple(rng.randrange(VOCABULARY) for _ in range(17))
    sampling = Sampling(temperature=0.0, max_tokens=12, ignore_end=True)
    for i in range(3):
        one.add(Request(id=f"old{i}", prompt=prompt, sampling=sampling))
    old = [o for _ in range(5) for o in one.step()]
    assert old
    one.update_weights(1)
    requests = [Request(id=str(i), prompt=prompt, sampling=sampling) for i in range(4)]
    outputs = run(one, requests, rng=rng)
    want, _ = expected(prompt, sampling, max_context=64, vocab_size=97, version=1)
    assert all(tokens(outputs[r.id]) == want for r in requests)
    assert all(len(tokens([*(o for o in old if o.id == f"old{i}"), *outputs[f"old{i}"]])) == 12 for i in range(3))


class Pattern:
    """A constraint to a list of allowed sets, after which the output is complete."""

    def __init__(self, *allowed, fail=None, error=ValueError):
        self.allowed, self.accepted, self.fail, self.error = allowed, [], fail, error

    def mask(self):
        if self.fail == "mask":
            raise self.error("no such schema")
        mask = np.zeros(-(-VOCABULARY // 32), np.uint32)
        for token in self.allowed[len(self.accepted)]:
            mask[token // 32] |= np.uint32(1 << (token % 32))
        return mask

    def accept(self, token):
        assert token in self.allowed[len(self.accepted)]
        self.accepted.append(token)
        if self.fail == len(self.accepted):
            raise self.error("cannot go on")
        return len(self.accepted) == len(self.allowed)


def test_constraints_in_a_batch_with_other_requests():
    for sizes in ({}, {"num_blocks": 17, "decode_steps": 4}):
        one, rng = engine(**sizes), random.Random(4)
        pending = requests_at_random(rng, 40)
        patterns = [Pattern(*({rng.randrange(97), rng.randrange(5, 97)} for _ in range(7))) for _ in range(20)]
        constrained = [
            Request(id=f"c{i}", prompt=(1, 2, i), constraint=p, sampling=Sampling(max_tokens=None, ignore_end=True))
            for i, p in enumerate(patterns)
        ]
        mixed = [*pending, *constrained]
        rng.shuffle(mixed)
        outputs = run(one, mixed, rng=rng)
        for i, pattern in enumerate(patterns):
            assert tokens(outputs[f"c{i}"]) == pattern.accepted
            assert (len(pattern.accepted), outputs[f"c{i}"][-1].finish) == (7, "stop")
        for request in pending:
            want, _ = expected(
                request.prompt, request.sampling, max_context=64, vocab_size=97, end_tokens=END,
                seed=request.sampling.seed,
            )  # fmt: skip
            assert tokens(outputs[request.id]) == want


@pytest.mark.parametrize(
    ("pattern", "message", "count", "request_wrong"),
    [
        (Pattern({1}, fail="mask"), "the constraint failed: no such schema", 0, False),
        (Pattern({1}, fail="mask", error=RequestError), "no such schema", 0, True),
        (Pattern(set()), "the constraint allows no token", 0, False),
        (Pattern({7}, {8}, {9}, fail=2), "the constraint failed: cannot go on", 2, False),
        (Pattern({7}, {8}, {9}, fail=2, error=RequestError), "cannot go on", 2, True),
    ],
)
def test_a_constraint_that_fails_ends_its_request_alone(pattern, message, count, request_wrong):
    one = engine()
    good = Request(id="good", prompt=(1, 2), sampling=Sampling(temperature=0.0, max_tokens=8, ignore_end=True))
    outputs = run(one, [Request(id="bad", prompt=(1, 2), constraint=pattern), good])
    assert outputs["bad"][-1].finish == "error"
    assert (outputs["bad"][-1].error, outputs["bad"][-1].request_wrong) == (message, request_wrong)
    assert len(tokens(outputs["bad"])) == count
    assert len(tokens(outputs["good"])) == 8


def test_the_token_that_ends_an_output_is_reported():
    one = engine(end=frozenset(range(0, 97, 2)))
    sampling = Sampling(temperature=0.0, stop_tokens=frozenset({1, 3, 5}), logprobs=2)
    outputs = run(one, [Request(id=str(i), prompt=(i,), sampling=sampling) for i in range(20)])
    for (*_, last), request in zip(outputs.values(), outputs, strict=True):
        want, reason = expected(
            (int(request),), sampling, max_context=64, vocab_size=97, end_tokens=one.end_tokens
        )  # fmt: skip
        assert (last.finish, tokens(outputs[request])) == (reason, want)
        if reason == "stop":
            stop = fake_runner.next_token((int(request), *want), sampling, 0, len(want), 97)
            assert last.stop_token == stop
            assert last.stop_logprobs == fake_runner.logprobs_of((int(request), *want), stop, 2)
        else:
            assert last.stop_logprobs is None


def test_several_tokens_come_from_one_step_where_all_decode():
    one = engine(decode_steps=4, end=frozenset())
    for i in range(3):
        one.add(Request(id=str(i), prompt=(i,), sampling=Sampling(max_tokens=22, temperature=0.0)))
    one.meter._token_seconds = 0.001
    outputs = run(one, [])
    assert max(steps for _, _, steps in one.runner.steps) == 4
    assert all(len(tokens(o)) == 22 for o in outputs.values())
    slow = engine(decode_steps=4, end=frozenset(), settings={"hold_seconds": 0.0})
    slow.add(Request(id="a", prompt=(1,), sampling=Sampling(max_tokens=22, temperature=0.0)))
    run(slow, [])
    assert {steps for _, _, steps in slow.runner.steps} == {1}


BAD = {
    "empty": ({"prompt": ()}, "the prompt is empty"),
    "unknown": ({"prompt": (1, 97)}, "no token 97"),
    "negative": ({"prompt": (-1,)}, "no token -1"),
    "huge": ({"prompt": (2**70,)}, "not a sequence of token ids"),
    "float": ({"prompt": (1.5,)}, "not a sequence of token ids"),
    "text": ({"prompt": ("a",)}, "not a sequence of token ids"),
    "long": ({"prompt": (1,) * 64}, "at most 63"),
    "adapter": ({"adapter": "lora"}, "unknown adapter 'lora'"),
    "temperature": ({"sampling": Sampling(temperature=float("nan"))}, "temperature: got nan"),
    "cold": ({"sampling": Sampling(temperature=-1)}, "temperature: got -1"),
    "top_p": ({"sampling": Sampling(top_p=-0.5)}, "top_p: got -0.5"),
    "sampling_logprobs": (
        {"sampling": Sampling(sampling_logprobs=True)},
        "sampling_logprobs: got True, expected False",
    ),
    "repetition": (
        {"sampling": Sampling(repetition_penalty=0)},
        "repetition_penalty: got 0, expected a finite number above 0",
    ),
    "min-tokens": ({"sampling": Sampling(min_tokens=3, max_tokens=2)}, "min_tokens: got 3, expected 0 to max_tokens"),
    "bad-tokens": ({"sampling": Sampling(bad_tokens=((97,),))}, "bad_tokens has the token 97"),
    "no-bad-tokens": ({"sampling": Sampling(bad_tokens=((),))}, "bad_tokens: got"),
    "prompt-logprobs": ({"sampling": Sampling(prompt_logprobs=-1)}, "prompt_logprobs: got -1"),
    "top_k": ({"sampling": Sampling(top_k=0)}, "top_k: got 0"),
    "min_p": ({"sampling": Sampling(min_p=1.5)}, "min_p: got 1.5"),
    "max_tokens": ({"sampling": Sampling(max_tokens=-1)}, "max_tokens: got -1"),
    "seed": ({"sampling": Sampling(seed=2**65)}, "seed"),
    "logprobs": ({"sampling": Sampling(logprobs=21)}, "logprobs: got 21, expected 0 to 20"),
    "penalty": ({"sampling": Sampling(presence_penalty=float("inf"))}, "presence_penalty: got inf"),
    "bias": ({"sampling": Sampling(logit_bias={97: 1.0})}, "logit_bias has the token 97"),
    "nan-bias": ({"sampling": Sampling(logit_bias={1: float("nan")})}, "logit_bias: got"),
    "stop": ({"sampling": Sampling(stop_tokens=frozenset({-3}))}, "stop_tokens has the token -3"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_computed_is_refused(name):
    fields, message = BAD[name]
    one = engine()
    with pytest.raises(RequestError, match=message):
        one.add(Request(**{"id": "a", "prompt": (1,), **fields}))
    assert not one.busy()


def test_one_id_is_one_request():
    one = engine()
    one.add(Request(id="a", prompt=(1,)))
    with pytest.raises(RequestError, match="'a' is not finished"):
        one.add(Request(id="a", prompt=(1,)))
    one.abort("a")
    one.abort("nobody")
    one.add(Request(id="a", prompt=(1,)))


def test_a_full_queue_says_when_to_come_again():
    one = engine(settings={"max_waiting": 5})
    for i in range(5):
        one.add(Request(id=str(i), prompt=(i,)))
    with pytest.raises(QueueFullError, match="5 requests are already waiting") as error:
        one.add(Request(id="x", prompt=(1,)))
    assert 1 <= error.value.retry_after <= 60
    one.step()
    one.add(Request(id="x", prompt=(1,)))


def test_an_engine_goes_on_after_its_runner_failed():
    one = engine()
    one.add(Request(id="a", prompt=(1, 2)))
    one.step()
    one.runner.fail = OSError("device lost")
    with pytest.raises(OSError, match="device lost"):
        one.step()
    assert not one.busy()
    check_blocks(one)
    one.runner.fail = None
    sampling = Sampling(temperature=0.0)
    want, _ = expected((1, 2), sampling, max_context=64, vocab_size=97, end_tokens=END)
    assert tokens(run(one, [Request(id="a", prompt=(1, 2), sampling=sampling)])["a"]) == want


def test_a_closed_engine_says_so():
    one = engine()
    one.close()
    one.close()
    with pytest.raises(RequestError, match="closed"):
        one.add(Request(id="a", prompt=(1,)))


def calls_per_step(waiting):
    """Count Python and C calls in ten steps with all rows in use and `waiting` requests in the queue."""
    one = engine(max_rows=6, settings={"max_waiting": 5000}, end=frozenset(), checks=False)
    for index in range(waiting + 6):
        sampling = Sampling(max_tokens=40, temperature=0.0)
        one.add(Request(id=str(index), prompt=(index % 90, 1, 2), sampling=sampling, client=str(index % 7)))
    for _ in range(5):
        one.step()
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # JAX has a callback for collections, which would be counted
    sys.setprofile(count)
    try:
        for _ in range(10):
            one.step()
    finally:
        sys.setprofile(None)
        gc.enable()
    assert one.statistics().waiting == waiting
    return calls


class StoppedClock:
    """A clock that stands still. With a real one, the meter does more work if a step took long on a busy machine."""

    @staticmethod
    def perf_counter():
        return 1.0

    monotonic = perf_counter


def test_a_step_does_as_much_with_a_long_queue(monkeypatch):
    monkeypatch.setattr(measure, "time", StoppedClock)
    assert calls_per_step(2000) == calls_per_step(100)
