"""Counts of requests and bytes in simulated jobs of several sizes. Nothing is timed."""

import json

import attrs
import pytest

from axlearn_core.checkpoint import piece_index as index_module
from axlearn_core.errors import CheckpointError
from axlearn_plugins_runtime.scale import command, cost_report
from axlearn_plugins_runtime.scale.simulation import LAUNCH, PARTS, SimulatedJob, simulate
from axlearn_plugins_runtime.scale.storage_models import MODELS, Use

SIZES = (32, 128, 512)


@pytest.fixture(scope="module")
def costs():
    """The costs of all parts for three sizes of a job, in which the index has several pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "LEAF", 64)
        groups = [
            simulate([*PARTS], size, MODELS["s3-like"], arrays=12, state_bytes=96 * 1024, sample=4) for size in SIZES
        ]
    return {part: [cost for group in groups for cost in group if cost.part == part] for part in PARTS}


@pytest.mark.parametrize("part", PARTS)
def test_no_cost_per_process_grows_with_the_job(costs, part):
    assert cost_report.fit_exponent(costs[part], "requests") <= 0.1
    assert cost_report.fit_exponent(costs[part], "bytes") <= 0.1


@pytest.mark.parametrize("part", PARTS)
def test_the_coordinator_does_at_most_linear_work(costs, part):
    # A count such as 9 P - 4 has an exponent that is slightly above 1.
    assert cost_report.fit_exponent(costs[part], "coordinator requests") <= 1.01
    # The messages name processes, whose numbers have more digits in larger jobs.
    assert cost_report.fit_exponent(costs[part], "coordinator bytes") <= 1.05


def test_a_save_makes_one_request_for_the_files_of_a_process(costs):
    for cost in costs["save"]:
        assert (cost.use.reads, cost.use.writes) == (0, 1)
        assert cost.use.written_bytes == 96 * 1024


def test_a_restore_reads_the_pieces_of_a_file_with_one_request(costs):
    """The others are the list of steps, the layout, the manifest, the extra data and the index."""
    for cost in costs["restore"]:
        assert cost.use.reads <= 10


def test_only_the_coordinator_downloads_what_grows(costs):
    small, large = costs["restore"][0], costs["restore"][-1]
    assert large.use.requests - small.use.requests <= 3
    assert large.use.read_bytes < 1.2 * small.use.read_bytes
    assert large.first_use.read_bytes > 2 * small.first_use.read_bytes  # it verifies the whole index


def test_a_restore_of_a_damaged_index_fails_before_arrays_are_read():
    job = SimulatedJob(32, arrays=4, state_bytes=4096, sample=3)
    job.save(1)
    data = bytearray(job.files.data["1/state/index/0.bin"])
    data[10] ^= 1
    job.files.data["1/state/index/0.bin"] = bytes(data)
    with pytest.raises(CheckpointError, match=r"state/index/0.bin: bytes 0 to \d+: got sha256"):
        job.restore()
    assert all(storage.use.read_bytes < 100_000 for storage in job.storages.values())
    assert not any(storage.use.reads > 10 for storage in job.storages.values())


def test_the_model_takes_the_slowest_limit():
    model = attrs.evolve(MODELS["s3-like"], retried=0.0)
    assert model.seconds(Use(), 100) == 0
    assert model.seconds(Use(reads=80), 1) == pytest.approx(80 * 0.1 / 8)
    assert model.seconds(Use(reads=1, read_bytes=680_000_000), 1) == pytest.approx((0.1 + 8) / 8)
    assert model.seconds(Use(reads=1), 55_000) == pytest.approx(10)
    assert model.seconds(Use(writes=1), 35_000) == pytest.approx(10)
    assert model.seconds(Use(reads=1, read_bytes=10**9), 10**6) == pytest.approx(1e15 / (5e12 / 8))
    assert model.seconds(Use(writes=1, written_bytes=10**9), 10**6) == pytest.approx(1e15 / (5e12 / 8))
    assert all(model.source.count("docs.aws") or "cloud.google" in model.source for model in MODELS.values())


def test_the_report_has_a_table_a_picture_and_json(costs):
    everything = [cost for part in PARTS for cost in costs[part]]
    text = cost_report.table(everything)
    assert text.count("exponent") == len(PARTS)
    assert "512" in text
    picture = cost_report.picture(everything)
    assert picture.count("<polyline") == len(PARTS) * len(cost_report.FIGURES)
    body = json.loads(json.dumps(cost_report.as_json(everything, {"storage": "s3-like"})))
    assert body["exponents"].keys() == PARTS.keys()
    assert body["costs"][0]["use"]["writes"] == 1
    square = [attrs.evolve(cost, messages=cost.processes**2, use=Use()) for cost in costs["join"]]
    assert cost_report.fit_exponent(square, "requests") == pytest.approx(2)


def test_the_command_names_the_parts_that_run(runner_scale):
    assert (
        "simulating 3 processes and running 2 of them"
        in runner_scale("--processes", "3", "--sample", "2", "--part", "join").stderr
    )
    result = runner_scale("--part", "join,watc", code=2)
    assert "unknown part 'watc'" in result.stderr
    assert "nearest: watch" in result.stderr
    assert "ends in .svg" in runner_scale("--picture", "/nowhere/a.svg", code=2).stderr
    assert (*PARTS, LAUNCH) == command.PARTS
    assert tuple(MODELS) == command.STORAGES


def test_the_launcher_is_a_part(runner_scale):
    shown = runner_scale("--processes", "80", "--part", "launch").stdout
    title, header, *_ = shown.partition("time from each event")[2].splitlines()
    assert title == " to the last order to start again:"
    assert all(event in header for event in ("start", "death of a process", "lost host", "64 lost hosts"))
    assert "storage:" not in shown


@pytest.fixture
def runner_scale():
    """`runner_scale(*words)` runs `axlearn bench scale` in this process."""
    from click.testing import CliRunner

    from axlearn_core.cli.main import cli

    def run(*words, code=0):
        result = CliRunner().invoke(cli, ["bench", "scale", *words])
        assert result.exit_code == code, result.stderr
        return result

    return run
