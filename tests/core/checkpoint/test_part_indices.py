"""Process 0 collects the indices of a save."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from axlearn_core.checkpoint import part_indices
from axlearn_core.checkpoint.part_indices import PartIndices
from axlearn_core.errors import StorageError
from axlearn_plugins_runtime.scale.coordinator import SimulatedCoordinator


@pytest.fixture
def run_save(monkeypatch):
    """`run_save(count, call)` runs `call(process, indices)` on each process, collects on process 0, and clears."""
    monkeypatch.setattr(part_indices, "POLL_SECONDS", 0.1)

    def run(count, call, seconds=20.0):
        coordinator = SimulatedCoordinator()

        def save(process):
            for _ in range(2):  # the second save must not see the first
                indices = PartIndices()
                call(process, indices)
                if process == 0:
                    try:
                        parts = indices.collect(seconds)
                    finally:
                        indices.clear()
            return parts if process == 0 else None

        with coordinator.replace_client(count), ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(coordinator.run_as, p, lambda p=p: save(p)) for p in range(count)]
            return futures[0].result(), coordinator

    return run


def test_process_0_collects_all_indices_in_order(run_save):
    parts, coordinator = run_save(40, lambda p, indices: indices.send(f"{p} {indices.number}".encode()))
    assert parts == [f"{p} 1".encode() for p in range(40)]
    assert not coordinator.list_keys()
    assert all(coordinator.messages[p].count == 2 for p in range(1, 40))
    parts, _ = run_save(1, lambda p, indices: indices.send(b"alone"))
    assert parts == [b"alone"]


def test_a_process_that_fails_is_named(run_save):
    def call(process, indices):
        if process == 7:
            indices.fail(OSError(28, "No space left on device"))
        elif process < 3:
            indices.send(b"x")

    with pytest.raises(StorageError, match=r"^process 7: .*No space left on device"):
        run_save(8, call)


def test_processes_that_are_late_are_named(run_save):
    with pytest.raises(StorageError, match=r"^process 2, 3 wrote no part within 0.3 s$"):
        run_save(4, lambda p, indices: indices.send(b"x") if p < 2 else None, seconds=0.3)
