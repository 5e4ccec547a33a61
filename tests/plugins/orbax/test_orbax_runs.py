"""Runs with this checkpointer: resumed bit for bit on any mesh, and read by every command that reads runs."""

import json
from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from click.testing import CliRunner

import axlearn_core as ax
from axlearn_core.cli.main import cli
from axlearn_core.errors import CheckpointError
from axlearn_core.run import open_weights
from axlearn_plugins_orbax.checkpointer import OrbaxCheckpointer
from support import api_runs, cli_runs

ORBAX = OrbaxCheckpointer.Config(every_steps=2)


def train(run, steps, **settings):
    return api_runs.train(run, steps=steps, **{"checkpointer": ORBAX, **settings})


def run_command(*words):
    result = CliRunner().invoke(cli, list(map(str, words)))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = tmp_path_factory.mktemp("whole") / "run"
    train(run, 6)
    return run


@pytest.mark.slow
def test_a_resumed_run_is_an_uninterrupted_one(whole, tmp_path):
    train(tmp_path / "run", 3)
    train(tmp_path / "run", 6)
    assert cli_runs.losses(tmp_path / "run") == cli_runs.losses(whole)
    resumed, uninterrupted = (open_weights(r).read() for r in (tmp_path / "run", whole))
    for path, value in uninterrupted.items():
        assert (resumed[path] == value).all(), path


@pytest.mark.slow
def test_the_checkpointer_changes_no_number(whole, tmp_path):
    train(tmp_path / "run", 6, checkpointer=ax.checkpoint.ShardedCheckpointer.Config(every_steps=2))
    assert cli_runs.losses(tmp_path / "run") == cli_runs.losses(whole)


@pytest.mark.slow
def test_commands_read_a_run(whole, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 20)
    assert run_command("generate", whole, "--prompt", "def ", "--max-tokens", 3)
    assert "loss" in run_command("evaluate", whole, "--data", text)
    rows = json.loads(run_command("checkpoint", "list", whole, "--json"))
    assert [(row["step"], row["state"]) for row in rows] == [(2, "complete"), (4, "complete"), (6, "complete")]
    run_command("checkpoint", "inspect", whole, "--verify")
    run_command("convert", whole, tmp_path / "converted", "--with", "moe:num_experts=2,top_k=1")
    assert run_command("generate", tmp_path / "converted", "--prompt", "def ", "--max-tokens", 3)


@pytest.mark.slow
def test_the_runs_that_are_made_of_a_run_work(whole, tmp_path):
    def check(model):
        assert run_command("generate", model, "--prompt", "def ", "--max-tokens", 3), model

    lora = tmp_path / "lora"
    api_runs.train(lora, f"lora:base={whole}", steps=4, checkpointer=ORBAX)
    assert [row["step"] for row in json.loads(run_command("checkpoint", "list", lora, "--json"))] == [2, 4]
    check(lora)
    run_command("lora", "merge", lora, tmp_path / "merged")
    run_command("lora", "export", lora, tmp_path / "adapters")
    run_command("quantize", whole, tmp_path / "quantized")
    run_command("upcycle", whole, tmp_path / "upcycled")
    run_command("checkpoint", "export-hf", whole, tmp_path / "hf")
    for name in ("merged", "quantized", "upcycled", "hf"):
        check(tmp_path / name)
    for name in ("merged", "quantized", "upcycled"):  # these keep the checkpointer of the run
        assert (tmp_path / name / "checkpoints").is_dir()
        assert next((tmp_path / name / "checkpoints").glob("*/state/_CHECKPOINT_METADATA"))
        run_command("checkpoint", "inspect", tmp_path / name, "--verify")
    for path, value in open_weights(whole).read().items():
        assert (open_weights(tmp_path / "hf").read(path)[path] == value).all(), path
    report = run_command("report", whole).strip()
    assert "quickstart" in Path(report).read_text()


@pytest.mark.slow
def test_a_run_and_a_step_of_it_are_served(whole):
    sizes = {"runner.max_rows": 1, "runner.max_context": 64, "runner.max_step_tokens": 16, "runner.chunk": 16}
    texts = []
    for step in (None, 2):
        texts.append(ax.load(whole, step=step).generate("def f(", max_tokens=8))
        with ax.serve(str(whole), step=step, set=sizes) as engine:
            (result,) = engine.generate("def f(", max_tokens=8, temperature=0)
        assert result.text == texts[-1]
    assert texts[0] != texts[1], "both steps were the same"


@pytest.mark.slow
def test_another_checkpointer_is_refused_by_name(whole, tmp_path):
    for ours, theirs in (
        (ORBAX, ax.checkpoint.ShardedCheckpointer.Config()),
        (ax.checkpoint.ShardedCheckpointer.Config(), ORBAX),
    ):
        run = tmp_path / type(ours).__qualname__
        train(run, 2, checkpointer=ours)
        with pytest.raises(
            CheckpointError, match=r"a different checkpointer wrote the checkpoint of step 2[^$]*checkpointer.type"
        ):
            train(run, 4, checkpointer=theirs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_a_step_of_plain_orbax_opens_with_a_note(tmp_path, caplog):
    train(tmp_path / "run", 2)
    weights = open_weights(tmp_path / "run").read()
    with ocp.training.Checkpointer(tmp_path / "run/checkpoints") as plain:
        assert plain.save(5, {"step": jnp.asarray(5), "params": {p: x + 1 for p, x in weights.items()}}, force=True)
    opened = open_weights(tmp_path / "run")
    assert opened.step == 5
    assert all((x == weights[path] + 1).all() for path, x in opened.read().items())
    assert "cannot be verified" in caplog.text
    assert open_weights(tmp_path / "run", step=2).step == 2
