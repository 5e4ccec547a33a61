"""The main job, end to end."""

import json
import signal

import pytest

from support import cli_runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of eight steps, never interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    result = cli_runs.axlearn(*cli_runs.arguments(run, steps=8), fresh=True)
    return run, result


def test_a_run_directory_has_what_is_promised(whole):
    run, result = whole
    assert [s for s, _ in cli_runs.losses(run)] == list(range(1, 9))
    first = cli_runs.metrics(run)[0]
    assert {"step", "loss", "step_seconds", "tokens_per_second"} <= first.keys()
    assert "resolved: true" in (run / "config.yaml").read_text()
    lock = json.loads((run / "run.lock.json").read_text())
    assert lock["experiment"] == "quickstart"
    assert lock["versions"]["axlearn-core"]
    assert lock["versions"]["jax"]
    assert lock["kernels"]
    assert len(lock["hlo_fingerprint"]) == 16
    assert lock["provenance"]["max_steps"][-1]["by"] == "--steps 8"
    assert result.stdout.strip() == str(run), "only the result on standard output"
    assert f"axlearn generate {run}" in result.stderr


def test_a_second_call_continues_bit_for_bit(whole, tmp_path):
    run = tmp_path / "run"
    cli_runs.axlearn(*cli_runs.arguments(run, steps=5))
    assert [s for s, _ in cli_runs.losses(run)] == list(range(1, 6))
    result = cli_runs.axlearn(*cli_runs.arguments(run, steps=8))
    assert "resuming from the checkpoint of step 5" in result.stderr
    assert cli_runs.losses(run) == cli_runs.losses(whole[0])


def test_a_finished_run_does_nothing_more(whole):
    run, _ = whole
    before = (run / "metrics.jsonl").read_text()
    cli_runs.axlearn(*cli_runs.arguments(run, steps=8))
    assert (run / "metrics.jsonl").read_text() == before


def test_generate_prints_only_the_text(whole):
    run, _ = whole
    first = cli_runs.axlearn("generate", str(run), "--prompt", "def ", "--max-tokens", "5")
    assert first.stdout.startswith("def ")
    again = cli_runs.axlearn("generate", str(run), "--prompt", "def ", "--max-tokens", "5")
    assert first.stdout == again.stdout


def test_another_experiment_in_the_directory_is_refused(whole):
    run, _ = whole
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    result = cli_runs.axlearn(
        *cli_runs.arguments(run, steps=9, settings=("model.decoder.layer.norm.eps=0.01",)), code=2
    )
    assert "model.decoder.layer.norm.eps: 1e-05 -> 0.01" in result.stderr
    assert "--allow-drift" in result.stderr
    assert before == {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    result = cli_runs.axlearn(*cli_runs.arguments(tmp_path, steps=2), code=2)
    assert "thesis.tex" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_interrupting_saves_and_says_how_to_go_on(whole, tmp_path):
    run = tmp_path / "run"
    process = cli_runs.start(*cli_runs.arguments(run, steps=5000, settings=("checkpointer.every_steps=100000",)))
    assert cli_runs.kill_when(process, lambda: len(cli_runs.logged(run)) >= 4, signal.SIGINT)
    message = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert "to resume: axlearn train quickstart" in message
    result = len(cli_runs.losses(run))
    cli_runs.axlearn(*cli_runs.arguments(run, steps=result + 2, settings=("checkpointer.every_steps=100000",)))
    assert [s for s, _ in cli_runs.losses(run)] == list(range(1, result + 3))
    assert cli_runs.losses(run)[:8] == cli_runs.losses(whole[0])[: result + 2]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_offered(whole, tmp_path):
    run = tmp_path / "run"
    cli_runs.axlearn(*cli_runs.arguments(run, steps=6))
    newest = max((p for p in (run / "checkpoints").iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    assert newest.name == "6"
    damaged = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 0xFF
    damaged.write_bytes(bytes(data))
    refused = cli_runs.axlearn(*cli_runs.arguments(run, steps=8), code=2)
    assert damaged.name in refused.stderr
    assert "--restore-step 3" in refused.stderr
    cli_runs.axlearn(*cli_runs.arguments(run, steps=8, more=("--restore-step", "3")))
    assert cli_runs.losses(run) == cli_runs.losses(whole[0])


@pytest.mark.slow
def test_a_loss_that_is_no_number_is_reported_with_its_batch(tmp_path):
    run = tmp_path / "run"
    settings = ("learner.optimizer={type: adamw, learning_rate: 1.0e+30}", "loop.max_nonfinite_steps=2")
    result = cli_runs.axlearn(*cli_runs.arguments(run, steps=50, settings=settings), code=1)
    assert "non-finite" in result.stderr
    assert "batch:" in result.stderr


@pytest.mark.slow
def test_eight_virtual_devices_give_the_loss_of_one(whole, tmp_path):
    run = tmp_path / "run"
    mesh = "mesh.shape={fsdp: 2, tensor: 2, data: 2}"
    cli_runs.axlearn(*cli_runs.arguments(run, steps=4, more=("--target", "cpu-8"), settings=(mesh,)))
    for (step, loss), (_, alone) in zip(cli_runs.losses(run), cli_runs.losses(whole[0])[:4], strict=True):
        assert loss == pytest.approx(alone, rel=1e-5), step
