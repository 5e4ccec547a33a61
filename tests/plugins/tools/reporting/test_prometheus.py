"""The Prometheus endpoint, scraped over HTTP and read by Prometheus' own parser."""

import json
import signal
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from axlearn_core.errors import RequestError
from axlearn_plugins_tools.reporting.prometheus import DISCOVERY, PrometheusTracker
from axlearn_plugins_tools.reporting.run_metrics import BUCKETS, GrowingFile
from axlearn_testing import TrainerSuite
from support import cli_runs

INFO = {
    "experiment": "quickstart",
    "parameters": 10,
    "devices": 2,
    "max_steps": 8,
    "start_step": 2,
    "run_dir": "runs/a",
}


def scrape(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        text = response.read().decode()
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def tracker(tmp_path):
    tracker = PrometheusTracker.Config().build(run_dir=tmp_path)
    yield tracker
    tracker.close()


def test_values_are_those_logged_last(tracker, tmp_path):
    tracker.start(INFO)
    before = scrape(tracker.address)
    assert before["axlearn_train_step",] == 2
    assert ("axlearn_train_loss",) not in before, "nothing was logged yet"
    tracker.log(3, {"loss": 2.5, "step_seconds": 0.5, "tokens_per_second": 100.0, "mfu": 0.4, "grad_norm": 1.5})
    tracker.log(4, {"loss": float("nan"), "step_seconds": 0.25, "grad_norm": 3.0})
    tracker.log(4, {"eval_loss": 1.25})
    values = scrape(tracker.address)
    assert values["axlearn_train_loss",] != values["axlearn_train_loss",], "not a number is said to be so"
    assert values["axlearn_train_step_seconds",] == 0.25
    assert ("axlearn_train_mfu",) not in values, "a value of an older step is not shown as this one's"
    assert values["axlearn_train_scalar", "grad_norm"] == 3.0
    assert values["axlearn_train_evaluation", "eval_loss"] == 1.25
    assert (values["axlearn_train_step",], values["axlearn_train_max_steps",]) == (4, 8)


def test_the_address_is_where_prometheus_looks_and_goes_away(tracker, tmp_path):
    tracker.start(INFO)
    (target,) = json.loads((tmp_path / DISCOVERY).read_text())
    assert target["labels"] == {"run": "runs/a"}
    assert target["targets"] == [tracker.address]
    address = tracker.address
    tracker.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(urllib.error.URLError):
        scrape(address)


def test_only_loopback_is_served_by_default(tracker):
    tracker.start(INFO)
    assert tracker.address.startswith("127.0.0.1:")


def test_a_port_in_use_is_one_clear_error(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        tracker = PrometheusTracker.Config(port=port).build(run_dir=tmp_path)
        with pytest.raises(
            RequestError, match=rf"127\.0\.0\.1:{port}: the port is in use\n.*\n.*fix: use --with prometheus"
        ):
            tracker.start(INFO)
        tracker.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_an_address_of_another_machine_is_refused(tmp_path, host):
    tracker = PrometheusTracker.Config(host=host).build(run_dir=tmp_path)
    with pytest.raises(RequestError, match=f"cannot listen on {host}:0: "):
        tracker.start(INFO)


def test_a_run_shows_its_time_checkpoints_and_incidents(tmp_path):
    suite = TrainerSuite()
    run_dir = tmp_path / "run"
    suite.run(run_dir, max_steps=3)
    suite.run(run_dir)
    (run_dir / "watchdog.jsonl").write_text('{"rule": "hang"}\n{"rule": "hang"}\n{"rule": "slow')
    (run_dir / "processes.jsonl").write_text('{"event": "started"}\n{"event": "exited"}\n{"event": "started"}\n')
    tracker = PrometheusTracker.Config().build(run_dir=run_dir)
    tracker.start(INFO)
    try:
        values = scrape(tracker.address)
        with (run_dir / "watchdog.jsonl").open("a") as file:
            file.write('_steps"}\n')
        later = scrape(tracker.address)
    finally:
        tracker.close()
    assert values["axlearn_train_attempts",] == 2
    assert values["axlearn_train_step",] == 5
    assert 0 < values["axlearn_train_goodput_ratio",] < 1
    phases = {key[1:]: value for key, value in values.items() if key[0] == "axlearn_train_phase_seconds"}
    assert {key for pair in phases for key in pair} == {*BUCKETS, *BUCKETS.values()}
    assert values["axlearn_train_goodput_ratio",] == pytest.approx(
        phases["productive", "productive"] / sum(phases.values())
    )
    assert values["axlearn_train_checkpoint_step",] == 5
    assert values["axlearn_train_checkpoints_total",] >= 2
    assert values["axlearn_train_failed_saves_total",] == 0
    assert values["axlearn_train_process_events_total", "started"] == 2
    assert values["axlearn_train_incidents_total", "hang"] == 2
    assert ("axlearn_train_incidents_total", "slow_steps") not in values
    assert later["axlearn_train_incidents_total", "slow_steps"] == 1


def test_scrapes_while_lines_are_written_miss_none(tmp_path):
    lines, path = [], tmp_path / "lines.jsonl"
    file = GrowingFile(path, lines.append, lines.clear)
    file.read()

    def write():
        with path.open("a", buffering=1) as out:
            for number in range(2000):
                for part in (f'{{"number": {number}', "}\n"):
                    out.write(part)
                    out.flush()

    thread = threading.Thread(target=write)
    thread.start()
    while thread.is_alive():
        file.read()
    thread.join()
    file.read()
    assert [line["number"] for line in lines] == list(range(2000))
    path.write_text('{"number": 7}\n[]\nnothing\n')
    file.read()
    assert lines == [{"number": 7}], "a shorter file is another one"


@pytest.mark.slow
def test_a_run_is_scraped_while_it_trains(tmp_path):
    run = tmp_path / "run"
    process = cli_runs.start(*cli_runs.arguments(run, steps=100_000, more=("--with", "prometheus")))
    values, end = {}, time.monotonic() + 300
    try:
        while values.get(("axlearn_train_checkpoints_total",), 0) < 3:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
            if (run / DISCOVERY).exists():
                values = scrape(json.loads((run / DISCOVERY).read_text())[0]["targets"][0])
        assert values["axlearn_train_step",] >= 9
        assert values["axlearn_train_loss",] > 0
        assert values["axlearn_train_tokens_per_second",] > 0
        assert values["axlearn_train_phase_seconds", "compile", "program_startup"] > 0
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 128 + signal.SIGINT
        assert not (run / DISCOVERY).exists()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_the_command_line_says_that_the_port_is_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        more = ("--with", f"prometheus:port={busy.getsockname()[1]}")
        result = cli_runs.axlearn(*cli_runs.arguments(tmp_path / "run", steps=1, more=more), code=2)
    assert "the port is in use" in result.stderr
    assert "Traceback" not in result.stderr
    cli_runs.axlearn(*cli_runs.arguments(tmp_path / "run", steps=1))
