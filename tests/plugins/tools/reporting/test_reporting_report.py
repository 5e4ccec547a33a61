"""The report of a run: what the page holds, and what becomes of missing, torn and hostile files."""

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner

from axlearn_core.errors import RequestError, WorkError
from axlearn_core.train.trackers import JsonlTracker
from axlearn_plugins_tools.reporting import Report, write_report
from axlearn_plugins_tools.reporting.command import report
from axlearn_plugins_tools.reporting.page import _held_out_losses
from axlearn_plugins_tools.reporting.run import read_run

CONFIG = """
resolved: true
type: trainer
model:
  type: causal-lm
  decoder: {type: decoder, num_layers: 6, tied: true, head: null}
  sizes: [1, 2]
trackers: [{type: jsonl}, {type: console, every_seconds: 1.0}]
max_steps: 40
"""
LOCK = {
    "experiment": "toy",
    "versions": {"jax": "0.10.2"},
    "python": "3.11",
    "platform": "cpu",
    "devices": "8 x cpu",
    "parameters": 2612345,
    "kernels": [{"op": "attention", "chosen": "reference"}],
    "provenance": {
        "max_steps": [{"by": "experiment toy", "value": "40"}],
        "model.decoder.type": [{"by": "experiment toy", "value": "plain"}, {"by": "feature rope", "value": "decoder"}],
        "model.decoder.num_layers": [{"by": "experiment toy", "value": "4"}, {"by": "--set", "value": "6"}],
        "model.gone": [{"by": "experiment toy", "value": "1"}, {"by": "feature rope", "value": "(absent)"}],
    },
}


def make(path, *, steps=40, every=1):
    tracker = JsonlTracker.Config().build(run_dir=path)
    tracker.start({"start_step": 0})
    for step in range(every, steps + 1, every):
        values = {"step_seconds": 0.5 + step / 1000, "tokens_per_second": 2000.0, "weight": 64.0, "grad_norm": 1 / step}
        tracker.log(step, {"loss": 8.0 / step, **values})
        if step % 10 == 0:
            tracker.log(step, {"eval_loss": abs(step - 30) / 10 + 1.25, "eval_nats_per_byte": 1 / step})
            tracker.text(step, "sample", f"def <script>{step}&")
    tracker.close()
    (path / "config.yaml").write_text(CONFIG)
    (path / "run.lock.json").write_text(json.dumps(LOCK))
    return path


class Checker(HTMLParser):
    """Every element is closed in order, and nothing is fetched or run."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert not {"src", "href", "onload", "onclick"} & {a for a, _ in attrs}
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def page_of(path):
    page = write_report(path).read_text()
    checker = Checker(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(checker.tags)
    assert not re.search(r"https?://|@import|url\(", page)
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(svg)
    return page, " ".join(checker.words)


def test_the_page_tells_the_run(tmp_path):
    page, words = page_of(make(tmp_path))
    assert page.count("<svg") == 6  # loss, two evaluation values, throughput, step times, gradient norm
    for fact in ("toy", "40 of 40", "done", "2,612,345", "8 x cpu", "2.2500", "best 1.2500 at step 30", "0.2000"):
        assert fact in words, fact
    percentiles = {p: float(v) for p, v in re.findall(r"<th>(p\d+)</th><td>([\d.]+) ms</td>", page)}
    expected = {"p5": 502.95, "p50": 520.5, "p90": 536.1, "p95": 538.05, "p99": 539.61}
    assert percentiles == pytest.approx(expected, abs=0.06)
    assert "Constant throughout: weight = 64" in words
    assert "def <script>40&" in words  # as text: the checker saw no script element
    assert "jax" in words
    assert "op: attention, chosen: reference" in words
    assert 'class="notes"' not in page


def test_auxiliary_losses_of_held_out_data_are_no_validation_loss(tmp_path):
    tracker = JsonlTracker.Config().build(run_dir=tmp_path)
    tracker.start({"start_step": 0})
    for step in (1, 2, 3):
        tracker.log(step, {"loss": 1.0 / step, "router_z_loss": 0.5})
        tracker.log(step, {"eval_router_z_loss": 7.0 / step, "eval_loss": 2.0 / step, "other_loss": 3.0 / step})
    tracker.close()
    assert _held_out_losses(read_run(tmp_path)) == ["eval_loss", "other_loss"]


def test_the_config_shows_who_set_what(tmp_path):
    page, _ = page_of(make(tmp_path))
    assert "experiment toy <b>4</b> → --set <b>6</b>" in page
    assert "experiment toy <b>plain</b> → feature rope <b>decoder</b>" in page
    assert '<span class="by">experiment toy</span>' in page
    assert "no longer in the config (1)" in page
    assert re.search(r"<details open><summary><span class=\"k\">decoder", page)
    assert re.search(r"<details><summary><span class=\"k\">trackers", page)
    for value in ("true", "null", "[1, 2]"):
        assert f'<span class="v">{value}</span>' in page


def test_everything_that_a_file_says_is_escaped(tmp_path):
    bad = "<img src=x onerror=alert(1)>\"'&\x1b\ud800"
    make(tmp_path)
    lock = {"experiment": bad, "parameters": bad, "devices": [bad], "data": {bad: bad}, "versions": {bad: bad}}
    lock["provenance"] = {"max_steps": [{"by": bad, "value": bad}, {"by": bad, "value": bad}], bad: bad}
    (tmp_path / "run.lock.json").write_text(json.dumps(lock))
    (tmp_path / "config.yaml").write_text(json.dumps({"max_steps": 3, "<b>": {"type": "<u>", "x": "<i>"}}))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 41, "loss": 1.0, bad: 0.5, "word": bad}) + "\n")
        file.write(json.dumps({"step": 41, bad + "_loss": 0.5}) + "\n")
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": 41, "name": bad, "text": bad}) + "\n")
    page, words = page_of(tmp_path)
    assert "<img" not in page
    assert not re.search(r"<[bui]>", page.replace("<b>&lt;img", ""))
    assert "<img src=x onerror=alert(1)>" in words


def test_missing_and_torn_files_are_told_inside_the_page(tmp_path):
    make(tmp_path)
    (tmp_path / "config.yaml").write_text("a: [1")
    (tmp_path / "run.lock.json").write_text('{"experiment": "to')
    (tmp_path / "samples.jsonl").unlink()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "loss": null, "nonfinite": {"loss": "nan"}}\nnoise\n{"step": 42, "lo')
    page, words = page_of(tmp_path)
    notes = re.findall("<li>(.*?)</li>", page, re.DOTALL)
    assert len(notes) == 5
    for part in (
        "config.yaml is damaged",
        "run.lock.json is damaged",
        "line 46, which is not a record",
        "the last line",
        "step 41",
    ):
        assert any(part in note for note in notes), part
    assert tmp_path.name in words
    assert "41" in words


def test_only_metrics_or_only_a_lock_make_a_page(tmp_path):
    make(tmp_path / "a", steps=1)
    for name in ("config.yaml", "run.lock.json", "samples.jsonl"):
        (tmp_path / "a" / name).unlink(missing_ok=True)
    page, words = page_of(tmp_path / "a")
    assert "config.yaml is missing" in words
    assert page.count("<svg") >= 3
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run.lock.json").write_text(json.dumps(LOCK))
    page, words = page_of(tmp_path / "b")
    assert "metrics.jsonl is missing" in words
    assert "<svg" not in page


@pytest.mark.slow
def test_a_long_run_stays_a_small_page_and_keeps_its_spikes(tmp_path):
    make(tmp_path)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 50001):
            loss = 97.0 if step == 31234 else 2.0
            file.write(json.dumps({"step": step, "loss": loss, "step_seconds": 0.1, "tokens_per_second": step}) + "\n")
    page, _ = page_of(tmp_path)
    assert len(page) < 400_000
    top = min(
        float(y) for y in re.search(r'class="line raw" points="([^"]*)"', page)[1].replace(",", " ").split()[1::2]
    )
    assert top == pytest.approx(24, abs=0.2)  # the spike reaches the top of the chart


@pytest.mark.parametrize("kind", ["missing", "file", "empty", "stranger"])
def test_what_is_no_run_is_refused_and_untouched(tmp_path, kind):
    path = tmp_path / "run"
    if kind == "file":
        path.write_text("")
    elif kind != "missing":
        path.mkdir()
        if kind == "stranger":
            (path / "notes.txt").write_text("")
    with pytest.raises(RequestError) as caught:
        write_report(path)
    assert caught.value.exit_code == 2
    expected = {"missing": "is missing", "file": "a file", "empty": "metrics.jsonl", "stranger": "notes.txt"}[kind]
    assert expected in str(caught.value)
    assert "axlearn train" in str(caught.value)
    assert not path.is_dir() or not (path / "report.html").exists()


def test_a_page_that_cannot_be_written_is_a_work_error(tmp_path):
    make(tmp_path)
    (tmp_path / "report.html").mkdir()
    with pytest.raises(WorkError, match=r"report\.html: Is a directory"):
        write_report(tmp_path)


def test_the_command_prints_the_path_alone(tmp_path):
    result = CliRunner().invoke(report, [str(make(tmp_path))])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{tmp_path / 'report.html'}\n"


def test_a_notebook_shows_sections_that_fold_and_keeps_its_own_style(tmp_path):
    report = Report.read(make(tmp_path))
    assert repr(report) == "Report(toy, step 40)"
    shown = report._repr_html_()
    checked = Checker(shown)
    assert "section" not in checked.tags
    assert checked.tags.count("details") > 5
    assert "def <script>40&" in "".join(checked.words)
    style = re.search(r"<style>(.*?)</style>", shown, re.S)[1]
    assert style.startswith(".axlearn-report {")
    assert ":root" not in style
    assert not re.search(r"\bbody\b", style)
    assert report.page == write_report(tmp_path).read_text("utf-8")
