"""Exchanges between threads that act as the processes of a job."""

import asyncio
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from axlearn_plugins_rl import rollout_exchange
from axlearn_plugins_rl.process_share import ProcessShare
from axlearn_plugins_rl.rollout_exchange import PeerError, RolloutExchange
from support.rollout_groups import group


class Coordinator:
    """Gathers the values of threads. It counts the calls on each channel."""

    def __init__(self, count):
        self.barrier, self.values, self.calls = threading.Barrier(count, timeout=10), {}, Counter()

    def gather(self, index):
        def gather_objects(value, name, seconds, *, channel):
            self.values[index] = json.loads(json.dumps(value))
            self.calls[channel.split("/")[2]] += 1
            self.barrier.wait()
            result = [self.values[i] for i in sorted(self.values)]
            self.barrier.wait()
            return result

        return gather_objects


def run_processes(monkeypatch, work, count=2):
    """Run `work(exchange, index)` in a thread per process. Return the results or errors, and the coordinator."""
    coordinator, local = Coordinator(count), threading.local()

    def gather(*args, **options):
        return coordinator.gather(local.index)(*args, **options)

    def run(index):
        local.index = index
        exchange = RolloutExchange(ProcessShare(index, count))
        try:
            return work(exchange, index)
        except Exception as error:
            return error

    monkeypatch.setattr(rollout_exchange, "gather_objects", gather)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count))), coordinator


def test_groups_are_in_the_order_of_the_processes(monkeypatch):
    def work(exchange, index):
        own = [group(number=10 * index + i) for i in range(2)]
        gathered = exchange.gather_groups(lambda: (own, {"rollout_seconds": float(index)}), "rollouts")
        assert gathered.groups[2 * index : 2 * index + 2] == own
        return [g.example.id for g in gathered.groups], gathered.scalars

    results, coordinator = run_processes(monkeypatch, work)
    assert results == [(["0", "1", "10", "11"], [{"rollout_seconds": 0.0}, {"rollout_seconds": 1.0}])] * 2
    assert coordinator.calls == {"batches": 2}


def test_an_error_of_one_process_is_raised_on_all(monkeypatch):
    def fail():
        raise ZeroDivisionError("no reward")

    def work(exchange, index):
        exchange.gather_groups(fail if index == 1 else lambda: ([group()], {}), "the rollouts of step 3")

    (first, second, third), coordinator = run_processes(monkeypatch, work, count=3)
    assert isinstance(second, ZeroDivisionError)
    for error in (first, third):
        assert isinstance(error, PeerError)
        assert "the rollouts of step 3 failed on process 1: ZeroDivisionError: no reward" in str(error)
    assert coordinator.calls == {"batches": 3}


def test_values_that_are_not_json_are_an_error_on_all(monkeypatch):
    (first, second), _ = run_processes(monkeypatch, lambda e, i: e.gather(np.ones(2) if i else 1.0, "metrics"))
    assert isinstance(first, PeerError)
    assert isinstance(second, TypeError)


def test_a_block_fails_on_all_processes_or_on_none(monkeypatch):
    def work(exchange, index):
        with exchange.together("opening"):
            if index == 0:
                raise OSError("no space")
        return "opened"

    first, second = run_processes(monkeypatch, work)[0]
    assert isinstance(first, OSError)
    assert "opening failed on process 0: OSError: no space" in str(second)


def test_one_process_sends_nothing(monkeypatch):
    monkeypatch.setattr(rollout_exchange, "gather_objects", None)
    exchange, own = RolloutExchange(), [group()]
    assert exchange.gather(object, "anything") == [object]
    assert asyncio.run(exchange.gather_from_rollouts(3, "rounds")) == [3]
    assert exchange.gather_groups(lambda: (own, {}), "rollouts").groups is own
    with pytest.raises(ValueError, match="own error"), exchange.together("work"):
        raise ValueError("own error")


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_that_blocks_does_not_block_the_event_loop(fails):
    released = threading.Event()

    def call():
        assert released.wait(10)
        if fails:
            raise ValueError("failed")
        return 7

    async def run():
        task = asyncio.ensure_future(rollout_exchange._run_in_thread(call))
        await asyncio.sleep(0.01)
        released.set()
        return await task

    if fails:
        with pytest.raises(ValueError, match="failed"):
            asyncio.run(run())
    else:
        assert asyncio.run(run()) == 7
