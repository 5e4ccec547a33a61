"""Requests that are submitted to an engine in this process, from threads and from asyncio."""

import asyncio
import random
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from unittest import mock

import attrs
import pytest

from axlearn_core.errors import RequestError
from axlearn_plugins_serving.contracts import Request, Sampling
from axlearn_plugins_serving.local_engine import LocalEngine
from axlearn_plugins_serving.turn_lock import TurnLock
from support.engine_runs import END, VOCABULARY, check_blocks, engine, requests_at_random
from support.fake_runner import expected

LONG = Sampling(temperature=0.0, max_tokens=50, ignore_end=True)


def local(**options):
    return LocalEngine(engine(**options))


def expected_sample(request):
    return expected(
        request.prompt, request.sampling, max_context=64, vocab_size=VOCABULARY, end_tokens=END,
        seed=request.sampling.seed,
    )  # fmt: skip


def check_sample(request, generation):
    sample = generation.sample
    assert (list(sample.tokens), sample.finish) == expected_sample(request)
    assert (sample.stop_token is not None) == (sample.finish == "stop")
    assert sample.versions == ((0, len(sample.drawn_tokens)),) or not sample.drawn_tokens


def wait_for_idle(one):
    """Wait until the driver has ended."""
    for _ in range(1000):
        if one._driver is None:
            return
        time.sleep(0.005)
    raise AssertionError("the driver still runs")


def test_submitted_requests_of_several_threads_get_what_they_get_alone():
    one = local(latency=0.0005)
    requests = requests_at_random(random.Random(1), 60)

    def use(part):
        futures = [one.submit(request) for request in part[::2]] + one.submit_all(part[1::2])
        generated = one.generate([(1, 2, 3)], LONG)[0].tokens
        return futures, generated

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(use, [requests[i::4] for i in range(4)]))
    for (futures, generated), part in zip(results, [requests[i::4] for i in range(4)], strict=True):
        for request, future in zip([*part[::2], *part[1::2]], futures, strict=True):
            check_sample(request, future.result(10))
        assert list(generated) == expected((1, 2, 3), LONG, max_context=64, vocab_size=VOCABULARY)[0]
    wait_for_idle(one)
    check_blocks(one.engine)
    assert (one.statistics().used_blocks, one._unfinished, one._running) == (0, {}, {})


def test_log_probabilities_include_the_token_that_ends_the_output():
    one = local()
    options = Sampling(temperature=0.0, max_tokens=60, logprobs=2, sampling_logprobs=True)
    requests = [Request(id=str(i), prompt=(i,), sampling=options) for i in range(20)]
    samples = [future.result(10).sample for future in one.submit_all(requests)]
    ended = [sample for sample in samples if sample.finish == "stop"]
    assert ended
    for sample in samples:
        assert [place.token for place in sample.drawn_logprobs] == list(sample.drawn_tokens)
        assert all(place.sampling_logprob == -0.5 for place in sample.drawn_logprobs)
        assert sample.drawn_tokens == (*sample.tokens, *([sample.stop_token] if sample.finish == "stop" else []))
    assert all(sample.stop_token in END for sample in ended)
    bare = one.generate([(1,)], attrs.evolve(options, logprobs=None, sampling_logprobs=False))[0].sample
    assert (bare.logprobs, bare.stop_logprobs, bare.drawn_logprobs) == (None, None, None)


def test_futures_can_be_awaited():
    one, requests = local(latency=0.0005), requests_at_random(random.Random(2), 12)

    async def turns(request):
        for turn in range(3):
            future = one.submit(attrs.evolve(request, id=f"{request.id}-{turn}"))
            check_sample(request, await asyncio.wrap_future(future))

    async def run():
        await asyncio.gather(*map(turns, requests))
        slow = one.submit(Request(id="slow", prompt=(1,), sampling=LONG))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(slow), 0.002)
        assert slow.cancelled()

    asyncio.run(run())
    wait_for_idle(one)
    assert one.statistics().used_blocks == 0


def test_a_cancelled_request_is_aborted():
    one = local(latency=0.002, max_rows=2)
    futures = one.submit_all([Request(id=str(i), prompt=(i, 1), sampling=LONG) for i in range(4)])
    assert futures[0].cancel()  # runs, or is about to
    assert futures[3].cancel()  # waits
    again = one.submit(Request(id="3", prompt=(9,), sampling=attrs.evolve(LONG, max_tokens=3)))  # its id is free again
    assert len(again.result(10).tokens) == 3
    for future in futures[1:3]:
        assert len(future.result(10).tokens) == 50
    assert wait(futures, 10).not_done == set()
    with pytest.raises(CancelledError):
        futures[0].result()
    wait_for_idle(one)
    assert one.statistics().used_blocks == 0


def test_closing_fails_the_futures():
    one = local(latency=0.01)
    futures = one.submit_all([Request(id=str(i), prompt=(i, 1), sampling=LONG) for i in range(9)])
    one.close()
    for future in futures:
        with pytest.raises(RequestError, match="closed during generation"):
            future.result(10)
    wait_for_idle(one)
    with pytest.raises(RequestError, match="the engine is closed"):
        one.submit(Request(id="a", prompt=(1,)))


def test_a_failure_of_the_engine_reaches_every_future():
    one = local(latency=0.002, max_rows=2, settings={"max_waiting": 3})
    futures = one.submit_all([Request(id=str(i), prompt=(i, 1), sampling=LONG) for i in range(9)])
    one.engine.runner.fail = RuntimeError("the device is lost")
    for future in futures:
        with pytest.raises(RuntimeError, match="device is lost"):
            future.result(10)
    one.engine.runner.fail = None
    request = Request(id="0", prompt=(1,), sampling=Sampling(seed=0))
    check_sample(request, one.submit(request).result(10))


def test_invalid_requests_start_nothing():
    one, good = local(), Request(id="good", prompt=(1,), sampling=LONG)
    for requests, message in (
        ([good, Request(id="bad", prompt=(VOCABULARY,))], "no token 97"),
        ([good, good], "'good' is not finished"),
        ([good, Request(id="text", prompt=(1,), embeds=True)], "computes no embeddings"),
    ):
        with pytest.raises(RequestError, match=message):
            one.submit_all(requests)
    with pytest.raises(RequestError, match="text cannot stop it"):
        one.submit(good, stop=["end"])
    assert (one._unfinished, one._driver, one.engine.busy()) == ({}, None, False)


def test_callbacks_may_use_the_engine():
    one, results = local(), []
    ended = threading.Event()

    def follow(future):
        results.append(one.generate([future.result().tokens], LONG, max_tokens=4)[0].tokens)
        one.close()
        ended.set()

    one.submit(Request(id="a", prompt=(1,), sampling=LONG)).add_done_callback(follow)
    assert ended.wait(10)
    assert len(results[0]) == 4


def test_samples_tell_which_weights_drew_their_tokens():
    one = local(latency=0.001)
    assert one.version == 0
    future = one.submit(Request(id="a", prompt=(1,), sampling=LONG))
    while one.statistics().output_tokens < 5:
        time.sleep(0.001)
    one.update_weights(1)
    one.update_weights(2, version=7)
    sample = future.result(10).sample
    versions, counts = zip(*sample.versions, strict=True)
    assert (versions[0], versions[-1], sum(counts)) == (0, 7, 50)
    assert list(versions) == sorted(versions)
    assert one.generate([(1, 2)], LONG)[0].sample.versions == ((7, 50),)


def run_together(earlier):
    """Return the results and the steps of a batch after other requests."""
    one = local(settings={"max_waiting": 20})
    if earlier:
        one.generate([(1, 2, 3)] * 4, LONG)
        one.update_weights(0)  # forgets their blocks
    before = len(one.engine.runner.steps)
    requests = requests_at_random(random.Random(5), 40)
    samples = [future.result(10).sample for future in one.submit_all(requests)]
    return [sample.tokens for sample in samples], one.engine.runner.steps[before:]


def test_the_steps_of_a_batch_do_not_depend_on_timing():
    tokens, steps = run_together(earlier=False)
    assert len(steps) > 20
    for _ in range(3):
        assert run_together(earlier=False) == (tokens, steps)
    assert run_together(earlier=True) == (tokens, steps)


def test_each_sample_can_have_its_own_seed():
    one, options = local(), Sampling(max_tokens=12, ignore_end=True)
    seeds = [[5, 9], [7, 5]]
    result = one.generate([(1, 2), (3, 4)], options, n=2, seeds=seeds)
    for prompt, row, generation in zip([(1, 2), (3, 4)], seeds, result, strict=True):
        for seed, sample in zip(row, generation.samples, strict=True):
            want = expected(prompt, options, max_context=64, vocab_size=VOCABULARY, seed=seed)[0]
            assert list(sample.tokens) == want
    with pytest.raises(RequestError, match=r"got: \[2\] seeds per prompt\n *expected: 2 for each of 2 prompts"):
        one.generate([(1, 2), (3, 4)], options, n=2, seeds=seeds[:1])


def test_an_engine_that_cannot_sleep_says_so():
    one = local()
    future = one.submit(Request(id="a", prompt=(1,), sampling=LONG))
    with pytest.raises(RequestError, match="a FakeRunner cannot free its memory"):
        one.sleep()
    assert not one.is_sleeping
    assert len(future.result(10).tokens) == 50


def test_threads_get_a_lock_in_the_order_in_which_they_ask():
    lock, order = TurnLock(), []

    def take(number):
        with lock:
            order.append(number)

    with lock:
        threads = [threading.Thread(target=take, args=(number,)) for number in range(6)]
        for number, thread in enumerate(threads):
            thread.start()
            while len(lock._turns) < number + 2:
                time.sleep(0.0005)
    for thread in threads:
        thread.join()
    assert order == list(range(6))


def test_a_lock_forgets_a_thread_that_is_interrupted():
    lock = TurnLock()
    with (
        lock,
        mock.patch.object(lock._changed, "wait_for", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        lock.__enter__()
    with lock:
        assert len(lock._turns) == 1
