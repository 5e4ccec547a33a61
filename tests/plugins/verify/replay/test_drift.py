"""Changes since a run computed a step."""

import pytest

from axlearn_core.errors import CheckpointError
from axlearn_plugins_verify.replay import drift

LOCK = {
    "versions": {"jax": "0.10.2", "plugin": "1.0"},
    "python": "3.11.7",
    "devices": "2 x cpu",
    "flags": {"XLA_FLAGS": "--xla_a=1"},
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"versions": {"jax": "0.10.3", "plugin": "1.0"}}, ["jax was 0.10.2, is 0.10.3"]),
        ({"versions": {"jax": "0.10.2"}}, ["plugin was 1.0, is not installed"]),
        ({"versions": {"jax": "0.10.2", "plugin": "1.0", "later": "1.0"}}, []),
        ({"devices": "1 x gpu"}, ["devices: was 2 x cpu, is 1 x gpu"]),
        ({"flags": {"XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=2"}}, []),
        ({"flags": {}}, ["flags: was {'XLA_FLAGS': '--xla_a=1'}, is {}"]),
        ({"python": "3.12.1"}, ["python: was 3.11.7, is 3.12.1"]),
    ],
)
def test_versions_devices_and_flags(monkeypatch, change, expected):
    monkeypatch.setattr(drift, "make_lock", lambda *_, **__: {**LOCK, **change})
    assert drift.version_drift(LOCK, None) == expected


def test_lock_without_versions_has_no_drift(monkeypatch):
    monkeypatch.setattr(drift, "make_lock", lambda *_, **__: dict(LOCK))
    assert drift.version_drift({}, None) == []


def test_compiled_step():
    class Compiled:
        def fingerprint(self, batch):
            return batch

    assert drift.step_drift({}, Compiled(), "b") == []
    assert drift.step_drift({"hlo_fingerprint": "b"}, Compiled(), "b") == []
    (line,) = drift.step_drift({"hlo_fingerprint": "a"}, Compiled(), "b")
    assert line.startswith("the compiled step was a, is b")


def test_error_lists_changes_and_counts_the_rest():
    changes = [f"change {i}" for i in range(drift.SHOWN + 2)]
    drift.check_drift("runs/a", 4, [], allow_drift=False)
    drift.check_drift("runs/a", 4, changes, allow_drift=True)
    with pytest.raises(CheckpointError, match="step 4 of runs/a cannot be replayed exactly") as caught:
        drift.check_drift("runs/a", 4, changes, allow_drift=False)
    message = str(caught.value)
    assert "change 11\n    and 2 more\n    fix: restore what changed, or pass --allow-drift" in message
    assert caught.value.exit_code == 2
