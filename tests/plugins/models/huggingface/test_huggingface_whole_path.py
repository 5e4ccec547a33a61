"""The path of a user: import a model directory, train on conversations with or without adapters, and export it."""

import importlib.util
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import axlearn_core as ax
from axlearn_plugins_finetune.lora.merge import merge_run
from axlearn_plugins_models.huggingface.files import stored_tensors
from axlearn_plugins_models.huggingface.import_export import export_run, import_run
from axlearn_plugins_models.huggingface.peft import export_peft
from support.needs import reason
from support.paths import HF_FIXTURES

FIXTURE = HF_FIXTURES / "llama3"  # in bfloat16, with a tied output layer
TUNE = """
experiment: runs/base/config.yaml
features:
  - chat: {data: talks.jsonl}
  %s
set:
  %s
  evaluators: {}
  trackers: [{type: jsonl}]
  input.batch_size: 8
  input.sequence_length: 32
  learner.optimizer: {type: adamw, learning_rate: 0.01}
  max_steps: 6
  log_every_steps: 1
"""
LORA = TUNE % ("- lora: {rank: 4, base: runs/base}", "seed: 1")
FULL = TUNE % ("- ema", "loop: {type: start-from-run, run_dir: runs/base}")


@pytest.fixture
def base(tmp_path, monkeypatch):
    """Make a folder with a model directory, a run imported from it, conversations, and config files."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FIXTURE, "hf", ignore=lambda *_: ["expected.safetensors"])
    talks = [(f"w{a} w{b}", f"w{a + b}") for a in range(1, 5) for b in range(5)]
    rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in talks]
    Path("talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("lora.yaml").write_text(LORA)
    Path("full.yaml").write_text(FULL)
    import_run(Path("hf"), Path("runs/base"))
    return tmp_path


def losses(run):
    return [json.loads(line)["loss"] for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def loaded_by_transformers(directory, adapters=None):
    """Map tokens to logits, with the libraries."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if adapters is not None:
        import peft

        model = peft.PeftModel.from_pretrained(model, adapters)
    return lambda tokens: model(torch.tensor(tokens)).logits.detach().numpy()


PARITY = ("torch", "transformers", "peft")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_in_tuned_and_out_again(base):
    ax.train("lora.yaml", run_dir="runs/adapted")
    ax.train("full.yaml", run_dir="runs/tuned")
    assert losses("runs/adapted")[-1] < losses("runs/adapted")[0]
    assert losses("runs/tuned")[-1] < losses("runs/tuned")[0]
    merge_run(Path("runs/adapted"), Path("runs/merged"))
    for run, out in (("merged", "merged-hf"), ("tuned", "tuned-hf")):
        export_run(Path("runs", run), Path(out), dtype="float32")
    export_peft(Path("runs/adapted"), Path("peft"), base="hf")

    before, after = stored_tensors(Path("hf")), stored_tensors(Path("merged-hf"))
    changed = {n for n, t in before.items() if np.any(t.rows(0, t.shape[0]) != after[n].rows(0, after[n].shape[0]))}
    assert {n.split(".")[-2] for n in changed} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert set(stored_tensors(Path("tuned-hf"))) == set(before)
    again = ax.load("merged-hf")
    assert again.generate("w1 w2", max_tokens=4) == ax.load("runs/merged").generate("w1 w2", max_tokens=4)
    if not all(map(importlib.util.find_spec, PARITY)):
        pytest.skip(f"{reason(*PARITY)} (the remaining steps)")
    tokens = np.random.default_rng(0).integers(3, 96, (2, 12))
    ours = {}
    for run in ("merged", "tuned"):
        source = ax.load(f"{run}-hf")
        ours[run] = np.asarray(source.model(jnp.asarray(tokens, jnp.int32)), np.float64)
    for run, theirs in (
        ("merged", loaded_by_transformers("merged-hf")),
        ("tuned", loaded_by_transformers("tuned-hf")),
        ("merged", loaded_by_transformers("hf", "peft")),
    ):
        assert np.abs(theirs(tokens) - ours[run]).max() < 1e-4 * np.abs(ours[run]).max()
