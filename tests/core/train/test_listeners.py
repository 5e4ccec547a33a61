"""Listeners of a run: what they are told and when, that a save can be refused, and that every opened one is closed."""

import pytest

import axlearn_core as ax
from axlearn_core.errors import PluginError, RequestError, WorkError
from axlearn_core.run.events import EVENTS, RunEvents, RunListener
from support import api_runs

SMALL = {
    **api_runs.SMALL,
    "checkpointer.every_steps": 2,
    "log_every_steps": 1,
}
MODULE = """
from axlearn_core.extend import RequestError, RunListener, WorkError
calls = []
class Recorder(RunListener):
    def __init__(self, refuse):
        self.refuse = refuse
    def opened(self, run):
        calls.append("opened")
        assert not (run.path / "config.yaml").exists() or run.run_dir.resumes
        if self.refuse == "run":
            raise RequestError("this run is refused")
    def restored(self, run):
        assert (run.path / "config.yaml").exists()
        calls.append(("restored", run.step))
    def phase(self, name, step, count_as=None):
        calls.append((name, step))
    def step(self, step, values):
        calls.append(("finished", step, sorted(values)[:0]))
    def saving(self, step):
        calls.append(("saving", step))
        if self.refuse == "save":
            raise WorkError("this save is refused")
    def closed(self):
        calls.append("closed")
class Failing(RunListener):
    def __init__(self, event):
        self.event = event
    def _meet(self, event):
        calls.append(event)
        if event in self.event.split(" and "):
            raise ValueError(f"boom at {event}")
    def opened(self, run):
        self._meet("opened")
    def step_begins(self, step):
        self._meet("step_begins")
    def saving(self, step):
        self._meet("saving")
    def saved(self, step, reason):
        assert reason is None
        self._meet("saved")
    def closed(self):
        self._meet("closed")
REFUSE = FAIL = ""
def recorder(session):
    return object() if FAIL == "make" else Failing(FAIL) if FAIL else Recorder(REFUSE)
def nothing(session):
    return None
"""
HOOKS = """
from axlearn_core.extend import hookimpl
@hookimpl
def axlearn_run_listeners():
    return ["listening:recorder", "listening:nothing"]
"""


@pytest.fixture
def listening(install):
    import importlib

    modules = {"listening": MODULE, "listening_hooks": HOOKS}
    install("axlearn-plugins-listening", "0.1", modules=modules, points={"plugins": {"listening": "listening_hooks"}})
    return importlib.import_module("listening")


def train(path, steps=3):
    return ax.train("quickstart", set=SMALL, steps=steps, run_dir=path)


@pytest.mark.slow
def test_a_listener_of_a_plugin_hears_the_whole_run(listening, tmp_path):
    train(tmp_path / "run")
    calls = listening.calls
    assert calls[0] == "opened"
    assert calls[-1] == "closed"
    assert calls.count("closed") == 1
    assert calls.index(("restore", 0)) < calls.index(("restored", 0)) < calls.index(("compile", 0))
    assert [c[1] for c in calls if c[0] == "finished"] == [1, 2, 3]
    assert [c[1] for c in calls if c[0] == "saving"] == [2, 3, 3]  # and once when the last save is complete
    calls.clear()
    train(tmp_path / "run", steps=4)
    assert ("restored", 3) in calls


def test_a_listener_can_refuse_a_run_before_anything_is_written(listening, tmp_path, monkeypatch):
    monkeypatch.setattr(listening, "REFUSE", "run")
    with pytest.raises(RequestError, match="this run is refused"):
        train(tmp_path / "run")
    assert listening.calls == ["opened", "closed"]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_listener_can_veto_a_save(listening, tmp_path, monkeypatch):
    monkeypatch.setattr(listening, "REFUSE", "save")
    with pytest.raises(WorkError, match="this save is refused"):
        train(tmp_path / "run")
    assert listening.calls[-1] == "closed"
    assert not [p for p in (tmp_path / "run").glob("checkpoints/*") if p.name.isdecimal()]


def test_only_methods_that_are_overridden_are_called():
    class Steps(RunListener):
        def __init__(self):
            self.steps = []

        def step(self, step, values):
            self.steps.append(step)

    one, other = Steps(), RunListener()
    events = RunEvents([one, other])
    events.notify("step", 5, {})
    assert one.steps == [5]
    assert {event: len(events._calls[event]) for event in EVENTS if events._calls[event]} == {"step": 1}


BY = "listening' = listening_hooks of axlearn-plugins-listening 0.1 has a run listener that "


def test_an_object_without_the_methods_is_refused_with_its_plugin(listening, tmp_path, monkeypatch):
    monkeypatch.setattr(listening, "FAIL", "make")
    with pytest.raises(PluginError, match=f"{BY}cannot be built: listening:recorder\\n.*not a RunListener"):
        train(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.fast_cases("opened")
@pytest.mark.parametrize("event", ["opened", "step_begins", "saving", "closed"])
def test_an_error_of_a_listener_names_its_plugin_and_the_event(listening, tmp_path, monkeypatch, event):
    monkeypatch.setattr(listening, "FAIL", event)
    with pytest.raises(WorkError, match=f"{BY}failed at the event {event}\\n    cause: ValueError: boom at {event}"):
        train(tmp_path / "run", steps=1)
    assert (tmp_path / "run").exists() == (event != "opened")


@pytest.mark.slow
def test_an_error_at_the_end_does_not_hide_the_one_that_ended_the_run(listening, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(listening, "FAIL", "step_begins and closed")
    with pytest.raises(WorkError, match="at the event step_begins"):
        train(tmp_path / "run", steps=1)
    assert "boom at closed" in capfd.readouterr().err


@pytest.mark.slow
def test_a_save_that_ended_stays_saved_if_a_listener_fails_then(listening, tmp_path, monkeypatch, capfd):
    """The commit had been counted as a save that failed, and the reason reported to the listeners again."""
    monkeypatch.setattr(listening, "FAIL", "saved")
    assert train(tmp_path / "run").step == 3
    assert [p.name for p in sorted((tmp_path / "run/checkpoints").iterdir())] == ["2", "3"]
    assert "failed at the event saved" in capfd.readouterr().err


@pytest.mark.slow
def test_a_refusal_keeps_its_class_and_a_message_names_the_plugin(listening, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(listening, "REFUSE", "save")
    with pytest.raises(WorkError, match=r"^this save is refused$"):
        train(tmp_path / "run")
    message = "the next error comes from listening of axlearn-plugins-listening 0.1, at the event saving"
    assert message in capfd.readouterr().err


PLACED = """
from axlearn_core.extend import RequestError, RunListener, WorkError
calls = []
class Usual(RunListener):
    def opened(self, run):
        calls.append(f"opened {self.position}")
    def restored(self, run):
        calls.append(f"restored {self.position}")
    def closed(self):
        calls.append(f"closed {self.position}")
class First(Usual):
    position = "first"
    errors_name_plugin = False
    def saving(self, step):
        raise OSError("the disk is full")
class Last(Usual):
    position = "last"
"""
PLACED_HOOKS = """
from axlearn_core.extend import hookimpl
@hookimpl
def axlearn_run_listeners():
    return [f"placed:{name}" for name in ("last", "usual", "first")]
"""


@pytest.mark.slow
def test_a_position_orders_listeners_and_an_error_may_stay_as_it_is(install, tmp_path):
    import importlib

    functions = "".join(f"def {n}(session):\n    return {n.title()}()\n" for n in ("first", "usual", "last"))
    install(
        "axlearn-plugins-placed",
        modules={"placed": PLACED + functions, "placed_hooks": PLACED_HOOKS},
        points={"plugins": {"placed": "placed_hooks"}},
    )
    placed = importlib.import_module("placed")
    with pytest.raises(OSError, match=r"^the disk is full$"):
        train(tmp_path / "run")
    order = ["first", "middle", "last"]
    calls = [f"{event} {position}" for event in ("opened", "restored") for position in order]
    assert placed.calls == [*calls, *(f"closed {position}" for position in reversed(order))]


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setenv("AXLEARN_PLUGINS", "-axlearn-plugins-runtime")


@pytest.mark.slow
def test_the_core_trains_without_job_parts_and_names_them(plain, tmp_path, capfd):
    assert train(tmp_path / "run").step == 3
    assert train(tmp_path / "run", steps=4).step == 4
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert {"config.yaml", "checkpoints", "metrics.jsonl"} <= names
    assert not names & {"phases.jsonl", "compiled"}
    message = "Ctrl-C and SIGTERM end this run without saving, and its directory is not locked against a second trainer"
    assert f"note: {message}\n    fix: pip install axlearn-plugins-runtime" in capfd.readouterr().err


def test_a_run_at_a_uri_needs_what_copies_it_there(plain, install, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    body = "    return None if not uri.startswith('disk://') else LocalStorage('/' + uri.removeprefix('disk://'))\n"
    source = "from axlearn_core.checkpoint.storage import LocalStorage\nfrom axlearn_core.extend import hookimpl\n"
    source += f"@hookimpl\ndef axlearn_checkpoint_storage(uri):\n{body}"
    install("axlearn-plugins-disk", modules={"disk_hooks": source}, points={"plugins": {"disk": "disk_hooks"}})
    with pytest.raises(RequestError, match=r"no installed plugin copies [^$]*pip install axlearn-plugins-runtime"):
        train(f"disk://{tmp_path.as_posix().lstrip('/')}/run")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "runs").exists()
