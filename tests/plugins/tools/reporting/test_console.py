"""Console output: a bar on a terminal, lines elsewhere, all on standard error."""

import io
import re
import time
import types

import pytest
from rich.console import Console

from axlearn_core.train.trackers import LinesTracker, printable
from axlearn_plugins_tools.reporting import notebook_bar
from axlearn_plugins_tools.reporting.console import ConsoleTracker
from axlearn_plugins_tools.reporting.durations import clock
from axlearn_plugins_tools.reporting.notebook_bar import NotebookBar

INFO = {"experiment": "quickstart", "parameters": 2_600_000, "devices": 1, "max_steps": 400, "start_step": 0}
VALUES = {"loss": 7.625, "tokens_per_second": 8012.3, "mfu": 0.412, "step_seconds": 0.25, "grad_norm": 1.0}


def test_lines_go_to_standard_error_and_align(capsys):
    tracker = ConsoleTracker.Config().build(run_dir="unused")
    tracker.start(INFO)
    tracker.log(10, VALUES)
    tracker.log(100, {**VALUES, "loss": 12.5, "tokens_per_second": 123456.0})
    tracker.log(100, {"eval_loss": 1.38123})
    tracker.close()
    out, err = capsys.readouterr()
    assert out == ""
    header, first, second, evaluated = err.splitlines()
    assert header == "quickstart · 2,600,000 parameters · 1 device · 400 steps"
    assert first == "step  10/400  loss  7.6250      8,012 tokens/s  MFU 41.2%  ETA 1:38"
    assert second.startswith("step 100/400  loss 12.5000    123,456 tokens/s  MFU 41.2%  ETA ")
    assert evaluated == "step 100/400  eval_loss 1.3812"


@pytest.mark.parametrize("kind", [ConsoleTracker, LinesTracker])
def test_the_trained_parameters_of_a_tuning_are_shown(kind, capsys):
    tracker = kind.Config().build()
    tracker.start({**INFO, "trained_parameters": 1_024})
    tracker.close()
    tracker.start({**INFO, "trained_parameters": INFO["parameters"]})
    tracker.close()
    tuned, whole = capsys.readouterr().err.splitlines()
    assert "2,600,000" in tuned
    assert ", of which 1,024 are trained" in tuned
    assert "2,600,000" in whole
    assert "trained" not in whole


def test_without_a_known_peak_there_is_no_mfu_and_a_nan_is_shown(capsys):
    tracker = ConsoleTracker.Config().build()
    tracker.start({**INFO, "start_step": 390})
    tracker.log(400, {"loss": float("nan"), "step_seconds": 0.5})
    _, err = capsys.readouterr()
    assert err.splitlines() == [
        "quickstart · 2,600,000 parameters · 1 device · resumes at step 390 of 400",
        "step 400/400  loss     nan    0.500 s/step",
    ]


def test_every_seconds_spaces_the_lines_out_but_keeps_the_last(capsys):
    tracker = ConsoleTracker.Config(every_seconds=3600.0).build()
    tracker.start(INFO)
    for step in (1, 2, 3, 400):
        tracker.log(step, VALUES)
    assert re.findall(r"step +(\d+)/", capsys.readouterr().err) == ["1", "400"]


def test_on_a_terminal_a_bar_stays_and_results_scroll_above_it():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=110, color_system=None, highlight=False)
    tracker = ConsoleTracker(ConsoleTracker.Config(), console=console)
    tracker.start(INFO)
    tracker.log(10, VALUES)
    tracker.log(10, {"eval_loss": 1.5})
    tracker.text(10, "sample", "def f():\n\treturn [bold]\x1b[2J")
    tracker.close()
    text = stream.getvalue()
    assert "compiling" in text
    assert "step 10/400" in text
    assert "MFU 41.2%" in text
    assert "ETA 1:3" in text
    assert "step  10/400  eval_loss 1.5000" in text
    assert "sample at step 10" in text
    assert "return [bold]\N{REPLACEMENT CHARACTER}[2J" in text
    assert text.endswith("\x1b[?25h")  # the cursor is back


def test_a_notebook_has_one_output_with_a_bar(monkeypatch):
    display = pytest.importorskip("IPython.display", reason="needs IPython")
    shown = []

    class Handle:
        def update(self, data, **_):
            shown.append(data)

    def record(data, *, raw, display_id):
        assert (raw, display_id) == (True, True)
        shown.append(data)
        return Handle()

    monkeypatch.setattr(display, "display", record)
    monkeypatch.setattr(notebook_bar, "_SECONDS", 3600.0)
    console = Console(file=io.StringIO(), force_jupyter=True, width=110)
    monkeypatch.setattr(console, "print", lambda *_, **__: None)  # would display HTML
    tracker = ConsoleTracker(ConsoleTracker.Config(), console=console)
    tracker.start(INFO)
    tracker.log(10, VALUES)  # too soon after the first
    tracker.log(400, VALUES)
    tracker.close()
    assert [data["text/plain"].split("  ")[0] for data in shown] == ["step 0/400", "step 400/400", "step 400/400"]
    assert shown[0]["text/plain"] == "step 0/400  compiling"
    assert '<progress value="400" max="400"' in shown[-1]["text/html"]
    assert "MFU 41.2%" in shown[-1]["text/html"]


def test_a_bar_in_a_notebook_is_updated_and_escapes(monkeypatch):
    display = pytest.importorskip("IPython.display", reason="needs IPython")
    shown = []
    handle = types.SimpleNamespace(update=lambda data, **_: shown.append(data))
    monkeypatch.setattr(display, "display", lambda *_, **__: handle)
    monkeypatch.setattr(notebook_bar, "_SECONDS", 0.0)
    bar = NotebookBar(10, 2)
    bar.update(3, "loss <b>", time.monotonic() + 61.5)
    assert shown[0]["text/plain"].startswith("step 3/10  loss <b>  ETA 1:0")
    assert "loss &lt;b&gt;" in shown[0]["text/html"]


def test_a_sample_cannot_steer_the_terminal(capsys):
    ConsoleTracker.Config().build().text(5, "sample", "a\x1b]0;title\x07\r\nb\ud800")
    bad = "\N{REPLACEMENT CHARACTER}"
    assert capsys.readouterr().err == f"sample at step 5:\n  | a{bad}]0;title{bad}\n  | b{bad}\n"


@pytest.mark.parametrize(("seconds", "text"), [(-3, "0:00"), (59.6, "1:00"), (61, "1:01"), (7325, "2:02:05")])
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_printable_keeps_text():
    assert printable("é 漢 🙂\t\n") == "é 漢 🙂\t\n"
