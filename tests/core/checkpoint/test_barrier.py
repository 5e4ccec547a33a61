"""Exchanges of small values between simulated processes. `test_checkpoint_processes.py` has real processes."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from axlearn_core.checkpoint import barrier
from axlearn_core.checkpoint.state import agree
from axlearn_core.errors import WorkError
from axlearn_plugins_runtime.scale.coordinator import SimulatedCoordinator


@pytest.fixture
def run_all():
    """`run_all(count, call)` returns what `call(process)` returned or raised on each process, and the coordinator."""

    def run(count, call):
        coordinator = SimulatedCoordinator()

        def outcome(process):
            try:
                return coordinator.run_as(process, lambda: call(process))
            except Exception as error:
                return error

        with coordinator.replace_client(count), ThreadPoolExecutor(count) as pool:
            return list(pool.map(outcome, range(count))), coordinator

    return run


def test_each_channel_counts_its_own_calls(run_all):
    def call(process):
        return [
            barrier.gather_objects([process, n], "values", channel=channel)
            for n, channel in enumerate(("", "rounds/", "", "rounds/", "rounds/"))
        ]

    results, coordinator = run_all(3, call)
    assert results == [[[[p, n] for p in range(3)] for n in range(5)]] * 3
    with coordinator.replace_client(1):
        assert barrier.gather_objects(5, "values") == [5]
    assert {key.rpartition("/")[0] for key in coordinator.list_keys()} == {"axlearn/1", "axlearn/rounds/2"}


def test_only_process_0_receives_the_values_of_the_others(run_all):
    results, coordinator = run_all(12, lambda p: barrier.reduce_objects("x" * 10_000 + str(p), len, "values"))
    assert results == [12] * 12
    assert all(coordinator.messages[p].count == 2 for p in range(1, 12))
    assert all(coordinator.messages[p].largest < 100 for p in range(1, 12))
    results, _ = run_all(12, lambda p: barrier.share_from_first({"process": p}, "values"))
    assert results == [{"process": 0}] * 12


def test_late_processes_are_named_up_to_a_limit(run_all):
    def call(process):
        return barrier.reduce_objects(process, sum, "sum", 0.3) if process < 3 else None

    (first, *others), _ = run_all(14, call)
    assert str(first).startswith("sum: waited 0.3 s for process 3, 4, 5, 6, 7, 8, 9, 10 and 3 more\n    fix: ")
    assert [str(error) for error in others[:2]] == [str(first)] * 2
    assert isinstance(first, WorkError)


def test_a_reduction_that_fails_is_reported_everywhere(run_all):
    (first, second), _ = run_all(2, lambda p: barrier.reduce_objects(p, lambda values: values[7], "values"))
    assert isinstance(first, IndexError)
    assert isinstance(second, WorkError)
    assert "values: process 0 failed: list index out of range" in str(second)


def test_processes_with_errors_are_named_to_the_others(run_all):
    def call(process):
        error = ValueError("broken") if process % 2 else None
        agree(error, error)

    results, _ = run_all(20, call)
    assert all(str(error) == "broken" for error in results[1::2])
    named = "a checkpoint failed on process 1, 3, 5, 7, 9, 11, 13, 15 and 2 more; see its error"
    assert [str(error) for error in results[::2]] == [named] * 10
