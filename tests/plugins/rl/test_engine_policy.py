"""The sampling parameters of a policy, and the way of its requests and results."""

import asyncio
import functools
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from axlearn_core.errors import WorkError
from axlearn_plugins_rl.engine_policy import AnswerDelivery, EnginePolicy, PolicyRequest, _put_copies_last
from axlearn_plugins_serving.contracts import Request


@pytest.mark.parametrize(
    ("settings", "limits"),
    [
        ({}, ""),
        ({"temperature": 0.7, "max_tokens": 4}, ""),
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"top_k": 5, "min_p": 0.1}, "top_k=5, min_p=0.1"),
    ],
)
def test_a_policy_names_its_limits_on_tokens(settings, limits):
    assert EnginePolicy.Config(**settings).limits == limits


def test_requests_with_an_earlier_prompt_start_last():
    prompts = [(1,), (1,), (2,), (1,), (2,)]
    waiting = [PolicyRequest(Request(id=str(i), prompt=prompt), (), None) for i, prompt in enumerate(prompts)]
    assert [entry.request.id for entry in _put_copies_last(waiting)] == ["0", "2", "1", "4", "3"]


def deliver(futures, end):
    """Return the answers of requests whose futures end in another thread, while one turn of an event loop lasts."""

    async def wait():
        loop = asyncio.get_running_loop()
        delivery = AnswerDelivery(loop)
        requests = [PolicyRequest(None, (), loop.create_future(), future) for future in futures]
        for request, future in zip(requests, futures, strict=True):
            future.add_done_callback(functools.partial(delivery.add, request))
        thread = threading.Thread(target=end)
        thread.start()
        thread.join()  # the loop stands still, so all results arrive in one turn
        return await asyncio.gather(*(request.answer for request in requests), return_exceptions=True)

    return asyncio.run(wait())


def test_results_and_errors_reach_the_event_loop():
    futures = [Future() for _ in range(3)]

    def end():
        futures[0].set_result("text")
        futures[1].set_exception(WorkError("the engine failed"))
        futures[2].cancel()

    result, error, cancelled = deliver(futures, end)
    assert result == "text"
    assert str(error) == "the engine failed"
    assert isinstance(cancelled, asyncio.CancelledError)


def test_all_results_of_an_engine_step_wake_the_loop_once(monkeypatch):
    calls = []
    call = asyncio.BaseEventLoop.call_soon_threadsafe
    monkeypatch.setattr(
        asyncio.BaseEventLoop, "call_soon_threadsafe", lambda loop, f, *a: (calls.append(f), call(loop, f, *a))[1]
    )
    futures = [Future() for _ in range(100)]
    assert deliver(futures, lambda: [f.set_result(i) for i, f in enumerate(futures)]) == [*range(100)]
    assert sum(f.__name__ == "_deliver" for f in calls) == 1


class HeldEngine:
    """An engine that never ends a request."""

    def __init__(self):
        self.engine = SimpleNamespace(max_context=8, runner=None)
        self.futures = []

    def submit_all(self, requests, *, stop):
        self.futures += (started := [Future() for _ in requests])
        return started


def test_a_cancelled_sample_aborts_its_request():
    engine = HeldEngine()
    policy = EnginePolicy.Config().build(engine=engine, text=None)

    async def cancel():
        tasks = [asyncio.ensure_future(policy.sample([1, 2], seed=seed)) for seed in range(3)]
        await asyncio.sleep(0)
        tasks[2].cancel()  # before it starts
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.wait(tasks, timeout=0.01)
        tasks[1].cancel()
        return [future.cancelled() for future in engine.futures]

    assert asyncio.run(cancel()) == [True, False]
