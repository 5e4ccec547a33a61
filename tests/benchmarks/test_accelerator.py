"""The harness of the benchmark for accelerators: a job that goes wrong loses only itself."""

import json
import os
import subprocess
import sys
import time

import pytest

from support.paths import ROOT

SCRIPT = ROOT / "benchmarks/accelerator.py"

JOBS = {
    "good": "context.record('figures', seconds=0.5, shares=[float('nan')])",
    "crash": "context.record('before', seconds=1.0); raise RuntimeError('broken')",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "hang": "context.record('before', seconds=1.0); import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)",
    "garbage": "print('\\x00 noise {'); open(context._rows, 'a').write('noise\\n[1]\\n{\"no\": 1}\\n')",
    "noise": "print('{\"name\": 1} noise'); context.record('figures', seconds=0.5)",
    "silent": "pass",
    "partial": "context.attempt('first', lambda: 1 / 0); context.attempt('second', lambda: {'seconds': 2.0})",
}


@pytest.fixture
def harness(monkeypatch):
    """The benchmark's modules."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from accelerator_jobs import findings, harness, jobs, report

    return {"harness": harness, "jobs": jobs, "report": report, "findings": findings}


@pytest.fixture
def run_jobs(harness, tmp_path, monkeypatch):
    """(names, minutes) -> (results, what was published after each change, the report)."""
    runner = tmp_path / "run_job.py"
    runner.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n"
        "from pathlib import Path\nfrom accelerator_jobs.context import Context\n"
        "context = Context(Path(sys.argv[2]), seconds=float(sys.argv[3]), rehearsal=True)\n"
        f"exec({JOBS!r}[sys.argv[1]])\n"
    )

    def command_of(job, rows, *, seconds, python, **_):
        return [python, str(runner), job.name, str(rows), str(seconds)]

    monkeypatch.setattr(harness["harness"], "command_of", command_of)

    def run(names, minutes=1.0):
        out = tmp_path / "out"
        out.mkdir()
        header = {"started": "now", "rehearsal": True, "command": "c", "machine": {"host": "h", "gpu": None}}
        header |= {"versions": {}, "missing": [], "commit": "0"}
        report, records = harness["report"].Report(out, header), []

        def publish(results):
            report.publish(results)
            records.append(json.loads(report.json.read_text())["parts"])

        part, job = harness["jobs"].Part, harness["jobs"].Job
        parts = [part(name, name, 1.0, (job(name, "x:y", weight=1.0),)) for name in names]
        runner = harness["harness"].Run(out=out, minutes=minutes, rehearsal=True, publish=publish)
        return runner.run(parts), records, report

    return run


def test_each_job_fails_alone_and_says_why(run_jobs):
    complete, records, report = run_jobs([n for n in JOBS if n != "hang"])
    assert not complete
    results = {p["part"]: p["jobs"][0] for p in records[-1]}
    status = {name: job["status"] for name, job in results.items()}
    assert status == dict.fromkeys(status, "failed") | {"good": "done", "noise": "done"}
    assert results["good"]["rows"] == [{"name": "figures", "seconds": 0.5, "shares": [None]}]
    assert "broken" in results["crash"]["output"]
    assert results["crash"]["rows"] == [{"name": "before", "seconds": 1.0}]
    assert results["killed"]["reason"] == "exit code -9"
    assert results["garbage"]["reason"] == "3 lines of its result are not rows"
    assert results["silent"]["reason"] == "it wrote no result"
    assert results["partial"]["reason"] == "first: ZeroDivisionError: division by zero"
    assert [r["name"] for r in results["partial"]["rows"]] == ["first", "second"]
    text = report.markdown.read_text()
    assert "**Rehearsal" in text
    assert "### killed: failed" in text


def test_a_hanging_job_is_stopped_with_what_it_started_and_keeps_its_rows(run_jobs):
    start = time.monotonic()
    complete, records, _ = run_jobs(["hang", "good"], minutes=0.1)
    assert time.monotonic() - start < 30
    assert not complete
    hang, good = (p["jobs"][0] for p in records[-1])
    assert hang["status"] == "timed out"
    assert hang["rows"] == [{"name": "before", "seconds": 1.0}]
    assert good["status"] == "done"


def test_results_are_published_as_they_come(run_jobs):
    _, records, _ = run_jobs(["good", "crash"])
    lengths = [len(parts) for parts in records]
    assert lengths == sorted(lengths)
    first = [parts[0]["jobs"][0]["status"] for parts in records if len(parts) == 1]
    assert first[-1] == "done", "the first part's result is there before the second part begins"


def test_a_job_without_time_is_not_started(harness, tmp_path):
    part, job = harness["jobs"].Part, harness["jobs"].Job
    run = harness["harness"].Run(out=tmp_path, minutes=0.01, rehearsal=False, publish=lambda results: None)
    assert not run.run([part("late", "late", 1.0, (job("late", "x:y"),))])
    assert run.results[0]["jobs"][0]["status"] == "not started"


def run_script(*options):
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})


def test_an_unknown_part_is_one_clear_error(tmp_path):
    result = run_script("--only", "step", "--out", str(tmp_path / "out"))
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.splitlines()[:2] == ["error: unknown part 'step'", "    did you mean: steps?"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [("--minutes", "0"), ("--wheels", "/no/such/folder")])
def test_a_wrong_request_is_refused(tmp_path, options):
    result = run_script(*options, "--out", str(tmp_path))
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr


def test_every_job_is_a_function_that_exists(harness):
    import importlib

    jobs = [j for p in harness["jobs"].PARTS for j in p.jobs]
    assert len({j.name for j in jobs}) == len(jobs)
    for job in jobs:
        module, _, name = job.function.partition(":")
        assert callable(getattr(importlib.import_module(f"accelerator_jobs.{module}"), name))


def results_of(**jobs):
    rows = [
        {"job": j.replace("_", "-"), "rows": [{"name": n, **r} for n, r in rows.items()]} for j, rows in jobs.items()
    ]
    return [{"part": "all", "title": "all", "jobs": rows}]


def test_goals_are_judged_by_what_was_measured(harness):
    findings = harness["findings"]
    ours = {"tokens_per_second": 130.0, "mfu_full": 0.6, "parameters": 7, "batch": 4}
    theirs = {"tokens_per_second": 100.0, "parameters": 7, "batch": 4}
    results = results_of(
        **{"1b": {findings.OURS: ours}, "pytorch-1b": {findings.THEIRS: theirs}},
        variants_1b={"fp8, scan": {"tokens_per_second": 160.0}},
    )
    actual = {f.name: f for f in findings.findings(results)}
    assert actual["tokens/s over torch.compile, 1b"].verdict == "reached"
    assert actual["tokens/s in fp8 over bf16, 1b"].verdict == "missed"
    assert actual["error of the plan's memory"].verdict == "not measured"
    results[0]["jobs"][1]["rows"][0]["parameters"] = 8
    assert {f.name: f for f in findings.findings(results)}["tokens/s over torch.compile, 1b"].value is None


def test_priorities_that_results_contradict_are_named(harness):
    rows = {
        "128x4096 cudnn": {"both_seconds": 2.0, "priority": 50},
        "128x4096 tokamax-mosaic": {"both_seconds": 1.0, "priority": 40},
        "64x4096 cudnn": {"both_seconds": 1.0, "priority": 50},
        "64x4096 xla": {"both_seconds": 9.0, "priority": 0},
    }
    (line,) = harness["findings"].disagreements(results_of(attention=rows))
    assert "tokamax-mosaic takes 0.50 of the time of cudnn" in line


@pytest.mark.slow
def test_batches_are_halved_until_they_fit(harness):
    from accelerator_jobs.timing import OutOfMemoryError, largest_batch

    released = []

    def measure(batch):
        if batch > 2:
            raise RuntimeError(f"RESOURCE_EXHAUSTED: out of memory with {batch}")
        return {"rows": batch}

    actual = largest_batch(8, measure, lambda: released.append(1))
    assert (actual["batch"], len(actual["too_large"]), len(released)) == (2, 2, 2)
    with pytest.raises(OutOfMemoryError, match="one row"):
        largest_batch(4, lambda batch: measure(9), lambda: None)
    with pytest.raises(ValueError, match="other"):
        largest_batch(4, lambda batch: (_ for _ in ()).throw(ValueError("other")), lambda: None)


PRINTED = {
    "one process": """
tests/plugins/gpu/test_a.py::test_one[h100] PASSED                       [ 33%]
tests/plugins/gpu/test_a.py::test_two FAILED                             [ 66%]
tests/plugins/gpu/test_b.py::test_three SKIPPED (needs a thing)          [100%]
tests/plugins/gpu/test_b.py::test_four
SKIPPED [1] tests/plugins/gpu/test_b.py:9: needs a thing
""",
    "several": """
tests/plugins/gpu/test_a.py::test_one[h100]
[gw0] [ 33%] PASSED tests/plugins/gpu/test_a.py::test_one[h100]
[gw1] [ 66%] FAILED tests/plugins/gpu/test_a.py::test_two
[gw0] [100%] SKIPPED tests/plugins/gpu/test_b.py::test_three
SKIPPED [1] tests/plugins/gpu/test_b.py:9: needs a thing
""",
}


@pytest.mark.parametrize("kind", PRINTED)
def test_outcomes_are_read_from_what_pytest_prints(harness, kind):
    from accelerator_jobs import kernel_tests

    outcomes = kernel_tests.outcomes_of(PRINTED[kind])
    assert {name.partition("::")[2]: outcome for name, outcome in outcomes.items()} == {
        "test_one[h100]": "PASSED",
        "test_two": "FAILED",
        "test_three": "SKIPPED",
    }
    assert kernel_tests.skip_reasons(PRINTED[kind]) == ["needs a thing"]


@pytest.mark.slow
def test_tests_of_kernels_that_are_missing_or_fail_are_told(harness, tmp_path, monkeypatch):
    from accelerator_jobs import kernel_tests
    from accelerator_jobs.context import Context

    def row(name):
        kernel_tests.measure(Context(tmp_path / name, seconds=60, rehearsal=True))
        return json.loads((tmp_path / name).read_text().splitlines()[-1])

    monkeypatch.setattr(kernel_tests, "ROOT", tmp_path)
    assert "is not a clone" in row("none")["skipped"]
    folder = tmp_path / kernel_tests.TESTS
    folder.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['slow', 'exhaustive']\n")
    text = "import pytest\ndef test_one(): pass\ndef test_two(): assert 0\ndef test_three(): pytest.skip('needs a thing')\n"
    (folder / "test_choices.py").write_text("markers = 1\n" + text)
    actual = row("some")
    assert (actual["passed"], actual["failed"], actual["skipped"]) == (1, 1, 1)
    assert actual["reasons"] == ["needs a thing"]
    assert actual["error"] == "1 tests failed: tests/plugins/gpu/test_choices.py::test_two"
