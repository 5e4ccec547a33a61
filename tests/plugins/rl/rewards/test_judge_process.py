"""The worker processes that call judges."""

import time

import pytest

from axlearn_plugins_rl.rewards import judge_process
from axlearn_plugins_rl.rewards.judge_process import FLUSH_SECONDS, JudgePool, pack_judge
from support.rl_rewards import Obedient, Unreadable, make_echo, make_obedient

JUDGE = pack_judge(make_obedient, Obedient)


@pytest.fixture
def pool():
    pool = JudgePool(1)
    yield pool
    pool.close()


@pytest.fixture
def messages(monkeypatch):
    """The number of calls in each message to a process."""
    sent, send = [], judge_process._Worker._send_calls

    def record(worker, number, jobs, missing):
        sent.append(len(missing))
        send(worker, number, jobs, missing)

    monkeypatch.setattr(judge_process._Worker, "_send_calls", record)
    return sent


def texts(*values):
    return [(value,) for value in values]


def submit_together(pool, *jobs, seconds=10.0):
    """Submit jobs while the process is busy, and return their results."""
    busy = pool.submit_all(JUDGE, texts("sleep 0.5"), seconds)
    futures = [pool.submit_all(JUDGE, job, seconds) for job in jobs]
    assert busy.result() == [0.5]
    return [[result if isinstance(result, float) else str(result) for result in f.result()] for f in futures]


def test_a_result_that_cannot_be_read_does_not_shift_the_others(pool):
    results = pool.submit_all(pack_judge(make_echo, Unreadable), texts("1", "unreadable", "3"), 10.0).result()
    assert (results[0], results[2]) == ("1", "3")
    assert "returned a value that cannot be read" in str(results[1])


def test_jobs_that_wait_share_a_message(pool, messages):
    assert submit_together(pool, texts("1", "2"), texts("3"), texts("4", "5", "6")) == [[1, 2], [3], [4, 5, 6]]
    assert messages == [1, 6]


def test_jobs_of_two_judges_share_a_message_each(pool, messages):
    echo = pack_judge(make_echo, Unreadable)
    busy = pool.submit_all(JUDGE, texts("sleep 0.5"), 10.0)
    futures = [pool.submit_all((JUDGE, echo)[i % 2], texts(str(i)), 10.0) for i in range(6)]
    assert busy.result() == [0.5]
    assert [future.result() for future in futures] == [[0], ["1"], [2], ["3"], [4], ["5"]]
    assert messages == [1, 3, 3]


def test_jobs_that_wait_when_the_pool_closes_are_cancelled(pool):
    assert pool.submit_all(JUDGE, texts("1"), 10.0).result() == [1]  # the process has started
    busy = pool.submit_all(JUDGE, texts("sleep 60"), 90.0)
    while not busy.running():
        time.sleep(0.01)
    waiting = pool.submit_all(JUDGE, texts("2"), 90.0)
    pool.close()
    assert waiting.cancelled()
    assert "ended its process" in str(busy.result()[0])


def test_a_failure_in_a_shared_message_belongs_to_its_call(pool):
    pause = f"sleep {2 * FLUSH_SECONDS}"  # the results so far are sent
    results = submit_together(
        pool,
        texts("1", "exit 3", "2"),
        texts("raise no", pause, "3", "sleep 60", "4"),
        texts("5", "exit 4"),
        seconds=2.0,
    )
    exited = "ended its process with the exit code {}"
    assert results[0] == [1.0, exited.format(3), 2.0]
    assert results[1][0].startswith("ZeroDivisionError: no")
    assert results[1][1:] == [0.5, 3.0, "took longer than 2 s", 4.0]
    assert results[2] == [5.0, exited.format(4)]


def test_a_job_that_cannot_be_read_fails_alone(pool):
    first, second = submit_together(pool, [(Unreadable(),), ("1",)], texts("2"))
    assert all("this process cannot read it" in text for text in first)
    assert second == [2.0]


def test_a_cancelled_job_is_not_judged(pool, tmp_path):
    busy = pool.submit_all(JUDGE, texts("sleep 0.5"), 10.0)
    cancelled, other = (pool.submit_all(JUDGE, texts(text), 10.0) for text in ("1", "2"))
    assert cancelled.cancel()
    assert (busy.result(), other.result()) == ([0.5], [2.0])
