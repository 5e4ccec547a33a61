import asyncio
import functools
import threading
import time
from concurrent.futures import CancelledError

import pytest

from axlearn_plugins_rl.rollout_worker import RolloutWorker
from support.rollout_groups import ConstantPolicy


class Engine:
    closed = False

    def close(self):
        self.closed = True


class Sync:
    def __init__(self):
        self.pushed = []

    def push(self, weights, version):
        self.pushed.append((weights, version))
        return 8


@pytest.fixture
def worker():
    policy = ConstantPolicy()
    policy.engine = Engine()
    instance = RolloutWorker(policy, Sync(), None, None)
    yield instance
    instance.close()
    assert policy.engine.closed


def test_jobs_run_one_at_a_time_in_order_in_another_thread(worker):
    log = []

    async def job(name):
        log.append((name, "begins", threading.current_thread().name))
        await asyncio.sleep(0.01)
        log.append((name, "ends", threading.current_thread().name))
        return name

    futures = [worker.submit(functools.partial(job, name)) for name in "abc"]
    assert [future.result() for future in futures] == ["a", "b", "c"]
    assert log == [(name, event, "rollouts") for name in "abc" for event in ("begins", "ends")]


def test_an_error_reaches_its_caller_and_the_next_job_runs(worker):
    async def fails():
        raise ValueError("damaged")

    async def works():
        return 1

    first, second = worker.submit(fails), worker.submit(works)
    with pytest.raises(ValueError, match="damaged"):
        first.result()
    assert second.result() == 1


def test_a_cancelled_job_ends_and_the_next_one_runs(worker):
    ended = threading.Event()

    async def waits():
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def works():
        return 1

    first, second = worker.submit(waits), worker.submit(works)
    time.sleep(0.01)
    first.cancel()
    assert second.result(5) == 1
    assert ended.wait(5)


def test_closing_cancels_the_jobs():
    policy = ConstantPolicy()
    policy.engine = Engine()
    worker = RolloutWorker(policy, Sync(), None, None)
    future = worker.submit(lambda: asyncio.sleep(60))
    worker.close()
    worker.close()
    with pytest.raises(CancelledError):
        future.result(1)


def test_weights_are_loaded_once_for_each_version_and_kind(worker):
    assert [worker.load("a", 1), worker.load("b", 1), worker.load("c", 1, kind="evaluation"), worker.load("d", 1)] == [
        8, 0, 8, 8,
    ]  # fmt: skip
    assert worker._sync.pushed == [("a", 1), ("c", 1), ("d", 1)]
