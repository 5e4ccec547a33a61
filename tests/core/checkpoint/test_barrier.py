"""Exchanges of small values, with a store that is given. `test_checkpoint_processes.py` has real processes."""

import jax
import pytest

from axlearn_core.checkpoint import barrier


class Store:
    """The coordinator's store, as process 0 of two sees it. Process 1 sends the same values."""

    def __init__(self):
        self.values = {}

    def key_value_set_bytes(self, key, value):
        assert key not in self.values
        self.values[key] = value

    def blocking_key_value_get_bytes(self, key, timeout):
        return self.values[f"{key.rpartition('/')[0]}/0"]

    def key_value_delete(self, folder):
        for key in [key for key in self.values if key.startswith(folder)]:
            del self.values[key]


@pytest.fixture
def store(monkeypatch):
    instance = Store()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(barrier, "coordination_client", lambda: instance)
    monkeypatch.setattr(barrier, "_numbers", type(barrier._numbers)(barrier._numbers.default_factory))
    return instance


def test_each_channel_counts_its_own_calls(store):
    for value, channel in enumerate(("", "rounds/", "", "rounds/", "rounds/")):
        assert barrier.gather_objects(value, "values", channel=channel) == [value, value]
    assert {key.rpartition("/")[0] for key in store.values} == {"axlearn/1", "axlearn/rounds/2"}
