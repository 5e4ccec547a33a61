"""The watchdog: what it keeps as a part, its actions, and runs that hang."""

import http.server
import json
import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import axlearn_core as ax
from axlearn_core.errors import RequestError
from axlearn_plugins_runtime.actions import RESTART, DumpStacks, RestartProcess, Webhook
from axlearn_plugins_runtime.feature import WatchdogFeature
from axlearn_plugins_runtime.watchdog import RuleWatchdog
from axlearn_plugins_runtime.watchdog_rules import Hang, LossSpike
from axlearn_testing import WatchdogSuite


@pytest.mark.slow_cases("test_failed_run_releases_resources")
class TestWatchdog(WatchdogSuite):
    config = RuleWatchdog.Config(rules={"hang": Hang.Config(seconds=1.0, start_seconds=1.0)})
    seconds = 1.0

    @staticmethod
    def acted(run_dir):
        return (run_dir / "watchdog.jsonl").exists()


def incidents(run_dir):
    return [json.loads(line) for line in (run_dir / "watchdog.jsonl").read_text().splitlines()]


def wait_for(path, seconds=20.0):
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    return path.exists()


def test_an_incident_is_recorded_with_the_stacks(tmp_path, capfd):
    watchdog = RuleWatchdog.Config(rules={"stuck": Hang.Config(seconds=0.3)}).build(run_dir=tmp_path)
    watchdog.start()
    watchdog.beat("input", 7)
    assert wait_for(tmp_path / "stacks-0.txt")
    time.sleep(1)
    watchdog.close()
    (incident,) = incidents(tmp_path)
    assert (incident["rule"], incident["phase"], incident["step"], incident["rank"]) == ("stuck", "input", 7, 0)
    assert incident["pid"] == os.getpid()
    stacks = (tmp_path / "stacks-0.txt").read_text()
    assert "no progress" in stacks
    assert "test_an_incident_is_recorded_with_the_stacks" in stacks, "of the main thread too"
    assert "watchdog: stuck: no progress" in capfd.readouterr().err


def test_children_are_listed(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        incident = {"time": "now", "rule": "hang", "message": "m", "rank": 0}
        DumpStacks.Config().build()(incident, tmp_path)
    finally:
        child.kill()
        child.wait()
    assert f"child process {child.pid}: " in (tmp_path / "stacks-0.txt").read_text()


def test_scalars_reach_the_rules(tmp_path):
    watchdog = RuleWatchdog.Config(rules={"spike": LossSpike.Config(steps=1)}).build(run_dir=tmp_path)
    for step in range(30):
        watchdog.observe(step, {"loss": 2.0})
    watchdog.observe(30, {"loss": 20.0})
    watchdog.close()
    assert incidents(tmp_path)[0]["rule"] == "spike"


@pytest.fixture
def receiver():
    """(URL, what was posted to it)."""
    posts = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", posts
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_webhook_gets_the_incident(tmp_path, monkeypatch, receiver):
    url, posts = receiver
    monkeypatch.setenv("AXLEARN_WEBHOOK", url)
    rule = LossSpike.Config(steps=1, actions=(Webhook.Config(),))
    watchdog = RuleWatchdog.Config(rules={"spike": rule}).build(run_dir=tmp_path)
    for step in range(31):
        watchdog.observe(step, {"loss": 2.0 if step < 30 else 20.0})
    for _ in range(100):
        if posts:
            break
        time.sleep(0.05)
    watchdog.close()
    assert posts[0]["rule"] == "spike"
    assert posts[0]["text"].startswith("spike: the loss is 20")


def test_a_missing_webhook_is_reported_and_harmless(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("AXLEARN_WEBHOOK", "http://127.0.0.1:9/")
    Webhook.Config().build()({"rule": "r", "message": "m"}, tmp_path)
    for _ in range(100):
        if not any(t.name == "watchdog-webhook" for t in threading.enumerate()):
            break
        time.sleep(0.05)
    assert "the webhook cannot be reached" in capfd.readouterr().err


@pytest.mark.parametrize(("url", "says"), [(None, "is not set"), ("file:///etc/passwd", "is not an http or https URL")])
def test_a_webhook_needs_a_url(monkeypatch, url, says):
    monkeypatch.delenv("AXLEARN_WEBHOOK", raising=False)
    if url:
        monkeypatch.setenv("AXLEARN_WEBHOOK", url)
    with pytest.raises(RequestError, match=says):
        Webhook.Config().build()


def test_a_disk_that_fails_does_not_end_the_watch(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    rule = LossSpike.Config(steps=1)
    watchdog = RuleWatchdog.Config(rules={"spike": rule}).build(run_dir=tmp_path / "file")
    for step in range(31):
        watchdog.observe(step, {"loss": 2.0 if step < 30 else 20.0})
    watchdog.close()
    assert "watchdog: spike:" in (message := capfd.readouterr().err)
    assert "watchdog: NotADirectoryError" in message or "watchdog: FileExistsError" in message


PROCESS = """
    import ctypes, sys, time
    from pathlib import Path
    from axlearn_plugins_runtime.actions import DumpStacks, RestartProcess
    from axlearn_plugins_runtime.watchdog_rules import Hang
    from axlearn_plugins_runtime.watchdog import RuleWatchdog

    hang = Hang.Config(seconds=1.0, start_seconds=1.0, actions=(DumpStacks.Config(), RestartProcess.Config()))
    watchdog = RuleWatchdog.Config(rules={"hang": hang}).build(run_dir=Path(sys.argv[1]))
    watchdog.start()
    watchdog.beat("step", 3)
    time.sleep(0.5)
    {hang}
"""


@pytest.mark.fast_cases("holding the interpreter")
@pytest.mark.parametrize(
    ("hang", "code"),
    [("time.sleep(60)", RESTART), ("ctypes.PyDLL(None).sleep(60)", 1)],
    ids=["waiting", "holding the interpreter"],
)
def test_a_process_that_hangs_is_ended_for_its_supervisor(tmp_path, hang, code):
    script = textwrap.dedent(PROCESS).replace("{hang}", hang)
    since = time.monotonic()
    process = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=50, capture_output=True, text=True)
    assert time.monotonic() - since < 50
    assert process.returncode == code, process.stderr
    assert 'File "<string>", line' in (tmp_path / "stacks-0.txt").read_text()


@pytest.mark.slow
def test_a_run_that_hangs_is_found_and_ended(tmp_path):
    (tmp_path / "hanging.py").write_text(
        textwrap.dedent("""
        import sys, time
        from pathlib import Path
        import axlearn_core as ax
        from axlearn_core.config import Configurable, node
        from axlearn_testing.train import Noise, Numbers, TrainerSuite
        from axlearn_plugins_runtime.actions import DumpStacks, RestartProcess
        from axlearn_plugins_runtime.watchdog_rules import Hang
        from axlearn_plugins_runtime.watchdog import RuleWatchdog

        class Stuck(Numbers):
            def __next__(self):
                if self.position == 3:
                    time.sleep(3600)
                return super().__next__()

        class StuckNoise(Noise):
            @node
            class Config(Noise.Config): ...

            def train(self):
                return Stuck()

        hang = Hang.Config(seconds=2.0, actions=(DumpStacks.Config(), RestartProcess.Config()))
        watchdog = RuleWatchdog.Config(rules={"hang": hang})
        TrainerSuite().run(Path(sys.argv[1]), input=StuckNoise.Config(), watchdog=watchdog)
        """)
    )
    run_dir = tmp_path / "run"
    process = subprocess.run(
        [sys.executable, str(tmp_path / "hanging.py"), str(run_dir)], timeout=120, capture_output=True, text=True
    )
    assert process.returncode == RESTART, process.stderr
    (incident,) = incidents(run_dir)
    assert incident["phase"] == "input"
    waited = float(incident["message"].split("for ")[1].split(" s")[0])
    assert 2.0 <= waited <= 4.0, "within twice the limit"
    assert "__next__" in (run_dir / "stacks-0.txt").read_text()


def test_the_feature_puts_it_in_place_and_is_execution():
    config = ax.resolve("quickstart", with_=["watchdog:hang_seconds=30,on_hang=restart"]).config
    hang = config.watchdog.rules["hang"]
    assert (hang.seconds, hang.actions[-1]) == (30.0, RestartProcess.Config())
    assert WatchdogFeature(hang_seconds=30.0, on_hang="restart").in_effect(config)
