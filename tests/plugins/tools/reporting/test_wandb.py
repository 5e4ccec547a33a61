"""The W&B tracker against a stand-in for the package: what it sends, and how it fails."""

import sys
import types

import pytest

from axlearn_core.errors import RequestError, WorkError
from axlearn_plugins_tools.reporting.wandb import WandbTracker


class Errors(types.ModuleType):
    class Error(Exception):
        pass

    class UsageError(Error):
        pass


class FakeRun:
    def __init__(self):
        self.records, self.metrics, self.finished, self.fail = [], [], False, None

    def define_metric(self, name, step_metric):
        self.metrics.append((name, step_metric))

    def log(self, record):
        if self.fail:
            raise self.fail
        self.records.append(record)

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    fake = types.ModuleType("wandb")
    fake.errors = Errors("wandb.errors")
    fake.started, fake.fail = [], None
    fake.Html = lambda data, inject: ("html", data, inject)

    def init(**settings):
        if fake.fail:
            raise fake.fail
        fake.started.append((settings, FakeRun()))
        return fake.started[-1][1]

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_a_resumed_run_continues_the_same_wandb_run(tmp_path, wandb):
    for start in (0, 5):
        tracker = WandbTracker.Config(project="p", mode="offline").build(run_dir=tmp_path / "toy-1")
        tracker.start({"start_step": start, "experiment": "toy"})
        tracker.log(start + 1, {"loss": 1.5})
        tracker.text(start + 1, "sample", "<b>\x1b")
        tracker.close()
    (first, run), (second, _) = wandb.started
    assert first["id"] == second["id"]
    assert first["name"] == "toy-1"
    assert (first["project"], first["mode"], first["resume"]) == ("p", "offline", "allow")
    assert first["config"] == {"start_step": 0, "experiment": "toy"}
    assert run.metrics == [("*", "step")]
    assert run.records[0] == {"step": 1, "loss": 1.5}
    assert run.records[1] == {"step": 1, "sample": ("html", "<pre>&lt;b&gt;\N{REPLACEMENT CHARACTER}</pre>", False)}
    assert run.finished


def test_without_the_package_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RequestError, match=r"axlearn-plugins-tools\[wandb\]"):
        WandbTracker.Config().build(run_dir=tmp_path)


def test_a_refusal_and_a_failure_are_told_apart(tmp_path, wandb):
    tracker = WandbTracker.Config().build(run_dir=tmp_path)
    wandb.fail = Errors.UsageError("api_key not configured")
    with pytest.raises(RequestError, match=r"api_key not configured[\s\S]*offline"):
        tracker.start({})
    wandb.fail = Errors.Error("no network")
    with pytest.raises(WorkError, match="no network"):
        tracker.start({})
    wandb.fail = None
    tracker.start({})
    wandb.started[-1][1].fail = OSError(28, "No space left on device")
    with pytest.raises(WorkError, match="No space left"):
        tracker.log(1, {"loss": 1.0})
