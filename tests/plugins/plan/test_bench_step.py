"""`axlearn bench step` measures the steps that ran."""

import json

import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_plan import bench

SMALL = {
    "model.decoder.num_layers": 1,
    "model.decoder.hidden_dim": 32,
    "model.decoder.layer.feed_forward.hidden_dim": 64,
    "input.batch_size": 8,
    "input.sequence_length": 32,
}
WORDS = ["bench", "step", "quickstart", *(w for k, v in SMALL.items() for w in ("--set", f"{k}={v}"))]


def measure(**options):
    resolved = resolve("quickstart", set=SMALL).check()
    return bench.measure_step(resolved, **{"steps": 3, "warmup": 1, "trace": None, **options})


@pytest.mark.slow
def test_figures_follow_from_the_steps(tmp_path):
    measured = measure(trace=tmp_path / "trace")
    facts = bench.as_json(measured)
    assert len(measured.seconds) == 3
    assert facts["seconds"]["least"] <= facts["seconds"]["median"] <= facts["seconds"]["most"]
    assert facts["tokens_per_second"] == pytest.approx(8 * 32 / measured.median)
    assert facts["mfu"] is None, "the peak of CPUs is unknown"
    assert measured.planned_bytes > 4 * 3 * 256 * 32, "less than the embedding and its moments"
    traces = list((tmp_path / "trace").iterdir())
    assert len(traces) == 1, "one trace is kept"
    assert list(traces[0].rglob("*.xplane.pb"))
    assert measured.traced_seconds is not None
    assert measured.traced_seconds > 0


def test_memory_is_that_of_the_process_where_devices_do_not_tell():
    watermark = bench._Watermark([])
    assert watermark.has_device_peak, "no device reports its memory"

    class Silent:
        def memory_stats(self):
            return None

    watermark = bench._Watermark([Silent(), Silent()])
    assert watermark.sharing == 2
    if watermark.before is None:
        pytest.skip("needs Linux with /proc/self/clear_refs")
    taken = bytearray(2**26)
    taken[:: 2**12] = b"x" * len(taken[:: 2**12])
    used = watermark.read()
    del taken
    assert used is not None
    assert used > 2**25


def test_mfu_is_of_the_peak():
    measured = bench.StepMeasurement(
        title="x", devices="1 x y", machine=None, seconds=(2.0, 1.0, 4.0), compile_seconds=0.0, input_seconds=0.0,
        tokens=100, model_flops=10, peak_flops=20.0, planned_bytes=1, used_bytes=1, sharing=1, trace=None,
        traced_seconds=None,
    )  # fmt: skip
    assert measured.mfu == pytest.approx(0.25)
    assert "MFU           25.0%" in bench.text(measured)


@pytest.mark.slow
def test_the_command_prints_one_object():
    result = CliRunner().invoke(cli, [*WORDS, "--measure", "2", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["steps"] == 2
    assert facts["used_bytes"] is None or facts["used_bytes"] >= 0


def test_options_reach_the_measurement(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(bench, "measure_step", lambda resolved, **options: calls.append(options))
    monkeypatch.setattr(bench, "text", lambda measured: "text")
    monkeypatch.setattr(bench, "as_json", lambda measured: {"form": "json"})
    options = ["--measure", "4", "--warmup", "2", "--trace", str(tmp_path / "trace")]
    assert CliRunner().invoke(cli, [*WORDS, *options]).stdout == "text\n"
    assert json.loads(CliRunner().invoke(cli, [*WORDS, "--json"]).stdout) == {"form": "json"}
    assert [(call["steps"], call["warmup"], call["trace"]) for call in calls] == [
        (4, 2, tmp_path / "trace"),
        (20, 3, None),
    ]


def test_what_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    result = CliRunner().invoke(cli, [*WORDS, "--trace", str(tmp_path)])
    assert result.exit_code == 2
    assert "is not an empty directory" in result.output
    result = CliRunner().invoke(cli, [*WORDS, "--target", "h100-8x1"])
    assert result.exit_code == 2
    assert "is not this machine" in result.output
