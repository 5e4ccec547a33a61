"""Workflows of users: fine-tune a run, merge it, and export its adapters. Trains toy models."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from click.testing import CliRunner

import axlearn_core as ax
from axlearn_core.checkpoint import manifest
from axlearn_core.cli.main import cli
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_core.run import open_weights
from axlearn_plugins_finetune.lora.adapters import is_adapter
from axlearn_plugins_finetune.lora.merge import export_run, merge_run
from axlearn_plugins_finetune.lora.start import StartFromRun, read_like

pytestmark = pytest.mark.slow

SETTINGS = {
    "model.decoder.num_layers": 1,
    "model.decoder.hidden_dim": 32,
    "model.decoder.layer.attention.num_heads": 2,
    "model.decoder.layer.feed_forward.hidden_dim": 32,
    "learner.optimizer": {"type": "adamw", "learning_rate": 0.01},
    "input.batch_size": 8,
    "input.sequence_length": 16,
    "evaluators": {},
    "trackers": [{"type": "jsonl"}],
    "log_every_steps": 1,
}
STILL = [{"pattern": "**", "learning_rate_scale": 0.0}]
"""Parameters stay as they were at first."""


def train(path, steps, lora=None, **more):
    features = {} if lora is None else {"lora": {"rank": 2, **lora}}
    ax.train("quickstart", with_=features, set={**SETTINGS, **more}, steps=steps, run_dir=path)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train a run and a run with adapters on it."""
    place = tmp_path_factory.mktemp("runs")
    base = train(place / "base", 2, **{"learner.ema_decay": 0.5})
    return base, train(place / "tuned", 3, {"base": str(base)})


def flat(run, step=None):
    return open_weights(run, step=step).read()


def test_a_run_begins_with_the_parameters_of_its_base(runs):
    base, tuned = runs
    before, after = flat(base), flat(tuned)  # the moving average of the base
    assert {p for p in after if not is_adapter(p)} == before.keys()
    assert all(np.array_equal(before[p], after[p]) for p in before)
    assert any(np.asarray(after[p]).any() for p in after if p.endswith("lora_b"))
    arrays = manifest.inspect(tuned / "checkpoints", 3).arrays
    assert not [p for p in arrays if p.startswith("learner.") and p.endswith(".weight")]


def test_a_run_with_experts_begins_with_a_dense_one(runs, tmp_path):
    """A run starts through the bridge of `moe`, and with adapters also through the bridge of `lora`."""
    base, _ = runs
    start = {"loop": {"type": "start-from-run", "run_dir": str(base)}, "learner.rules": STILL}
    ax.train("quickstart", with_=["moe:num_experts=2"], set={**SETTINGS, **start}, steps=1, run_dir=tmp_path / "moe")
    dense, experts = flat(base), flat(tmp_path / "moe")
    up, down = (f"decoder.layer.feed_forward.{n}.weight" for n in ("up", "down"))
    for path in (up, down):
        assert experts[path].shape[1] == 2
        assert all(np.array_equal(experts[path][:, i], dense[path]) for i in range(2))
    added = {p for p in experts if p not in dense}
    assert added == {"decoder.layer.feed_forward.router.weight"}
    assert all(np.array_equal(experts[p], dense[p]) for p in dense if "feed_forward" not in p)

    adapted = ["moe:num_experts=2", f"lora:rank=2,base={base},target=model.**"]
    ax.train("quickstart", with_=adapted, set=SETTINGS, steps=1, run_dir=tmp_path / "both")
    both = flat(tmp_path / "both")
    for path in (up, down):
        assert all(np.array_equal(both[path][:, i], dense[path]) for i in range(2))


def test_what_no_bridge_carries_over_says_why(runs, tmp_path):
    base, _ = runs
    start = {"loop": {"type": "start-from-run", "run_dir": str(base)}}
    with pytest.raises(
        CheckpointError, match=r"is a run of a different model: [\s\S]*mla: it computes keys[\s\S]*fix: remove mla"
    ):
        ax.train("quickstart", with_=["mla"], set={**SETTINGS, **start}, steps=1, run_dir=tmp_path / "mla")
    wide = {**SETTINGS, **start, "model.decoder.layer.feed_forward.hidden_dim": 48}
    with pytest.raises(
        CheckpointError, match=r"is a run of a different model: [\s\S]*differs: decoder.layer.feed_forward"
    ) as error:
        ax.train("quickstart", set=wide, steps=1, run_dir=tmp_path / "wide")
    assert "mla" not in str(error.value)


def test_merged_exported_and_merged_again(runs, tmp_path):
    base, tuned = runs
    merge_run(tuned, tmp_path / "merged")
    export_run(tuned, tmp_path / "alone")
    merge_run(base, tmp_path / "again", exported=tmp_path / "alone")
    one, two = ax.load(tmp_path / "merged"), ax.load(tmp_path / "again")
    assert one.step == 3
    assert not isinstance(one.config.loop, StartFromRun.Config)
    merged, other = flat(tmp_path / "merged"), flat(tmp_path / "again")
    assert all(np.array_equal(merged[p], other[p]) for p in merged)
    tokens = jax.random.randint(jax.random.key(0), (2, 12), 0, 2000)
    first, second = (np.asarray(jax.jit(lambda t, m=m: m(t))(tokens)) for m in (ax.load(tuned).model, one.model))
    np.testing.assert_allclose(first, second, atol=2e-5 * np.abs(first).max())
    assert isinstance(two.generate("def ", max_tokens=2), str)

    train(tmp_path / "merged", 4, **{"checkpointer.every_steps": 500})  # an ordinary run can continue
    assert manifest.steps(tmp_path / "merged" / "checkpoints") == [3, 4]

    size = sum(f.stat().st_size for f in (tmp_path / "alone").iterdir())
    assert size < 20_000
    train(tmp_path / "onward", 1, {"base": str(base), "adapters": str(tmp_path / "alone")}, **{"learner.rules": STILL})
    for path, value in flat(tuned).items():
        np.testing.assert_array_equal(value, flat(tmp_path / "onward")[path], err_msg=path)


@pytest.mark.parametrize("command", ["merge", "export"])
def test_absent_hardware_is_not_mentioned(command, runs, tmp_path):
    hidden = ("JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES")
    env = {name: value for name, value in os.environ.items() if name not in (*hidden, "XLA_FLAGS")}
    line = [sys.executable, "-m", "axlearn_core", "lora", command, str(runs[1]), str(tmp_path / "out")]
    process = subprocess.run(line, env=env, capture_output=True, text=True, timeout=240)
    assert (process.returncode, process.stdout, process.stderr) == (0, f"{tmp_path / 'out'}\n", "")


def test_exported_adapters_are_weights(runs, tmp_path):
    base, tuned = runs
    export_run(tuned, tmp_path / "alone")
    merge_run(tuned, tmp_path / "merged")
    weights, merged = open_weights(tmp_path / "alone"), flat(tmp_path / "merged")
    assert weights.specs().keys() == merged.keys()
    tensors = weights.read()
    for path, value in merged.items():
        np.testing.assert_array_equal(value, tensors[path], err_msg=path)
    one = weights.read("decoder.layer.attention.**")
    assert one.keys() == {p for p in merged if p.startswith("decoder.layer.attention.")}

    run = CliRunner().invoke
    words = ["--prompt", "def ", "--max-tokens", "4"]
    alone_text, merged_text = (run(cli, ["generate", str(tmp_path / name), *words]) for name in ("alone", "merged"))
    assert alone_text.exit_code == 0, alone_text.output
    assert alone_text.stdout == merged_text.stdout

    moved = tmp_path / "moved"
    base.rename(moved)
    try:
        lost = run(cli, ["generate", str(tmp_path / "alone"), *words])
        assert lost.exit_code == 2
        assert f"name it: {tmp_path / 'alone'}?base=RUN_DIR" in lost.stderr
        from_option = run(cli, ["generate", f"{tmp_path / 'alone'}?base={moved}", *words])
        assert from_option.stdout == merged_text.stdout
    finally:
        moved.rename(base)
    with pytest.raises(RequestError, match="adapters were trained on a different base"):
        open_weights(f"{tmp_path / 'alone'}?base={train(tmp_path / 'other', 1, seed=5)}").read()


def test_a_scheme_that_nobody_knows():
    for words in (["generate", "ftp://host/run", "--prompt", "x"], ["evaluate", "ftp://host/run", "--data", __file__]):
        result = CliRunner().invoke(cli, words)
        assert result.exit_code == 2
        assert "the scheme 'ftp' is unknown" in result.stderr


def test_what_does_not_fit_is_refused(runs, tmp_path):
    base, tuned = runs
    with pytest.raises(RequestError, match="has no adapters to merge"):
        merge_run(base, tmp_path / "no")
    with pytest.raises(RequestError, match="already exists"):
        merge_run(tuned, base)
    with pytest.raises(CheckpointError, match="not a run directory"):
        merge_run(tmp_path / "nowhere", tmp_path / "no")
    with pytest.raises(CheckpointError, match="has no checkpoint of step 9"):
        export_run(tuned, tmp_path / "no", step=9)
    export_run(tuned, tmp_path / "alone")
    with pytest.raises(RequestError, match="already has adapters"):
        merge_run(tuned, tmp_path / "no", exported=tmp_path / "alone")
    facts = json.loads((tmp_path / "alone" / "adapters.json").read_text())
    (tmp_path / "alone" / "adapters.json").write_text(json.dumps({**facts, "base": "0" * 64}))
    with pytest.raises(RequestError, match="on a different base"):
        merge_run(base, tmp_path / "no", exported=tmp_path / "alone")
    assert not (tmp_path / "no").exists()

    params = flat(tuned)
    with pytest.raises(CheckpointError, match=r"(?s)not in this model: .*lora.*merge its adapters first"):
        read_like(open_weights(tuned), {p: x for p, x in params.items() if not is_adapter(p)}, name="the run")
    with pytest.raises(CheckpointError, match=r"missing: decoder\.more\.weight"):
        read_like(open_weights(base), {**params, "decoder.more.weight": params["decoder.norm.weight"]}, name="the run")
    with pytest.raises(CheckpointError, match=r"differs: decoder.norm.weight: got \(32,\), expected \(31,\)"):
        read_like(
            open_weights(base), {**params, "decoder.norm.weight": params["decoder.norm.weight"][:31]}, name="the run"
        )


def test_a_base_in_bfloat16_merges_into_float32_and_exports(tmp_path):
    settings = {"model.dtype": "bfloat16"}
    base = train(tmp_path / "base", 2, **settings)
    tuned = train(tmp_path / "tuned", 3, {"base": str(base), "base_dtype": "bfloat16"}, **settings)
    before, after = flat(base), flat(tuned)
    assert all(np.array_equal(after[p], x.astype("bfloat16")) for p, x in before.items())
    merge_run(tuned, tmp_path / "merged")
    merged = flat(tmp_path / "merged")
    assert {str(x.dtype) for x in merged.values()} == {"float32"}
    path = "decoder.layer.attention.query.weight"
    assert not np.array_equal(merged[path], merged[path].astype("bfloat16").astype("float32"))
    export_run(tuned, tmp_path / "adapters")
    adapted = flat(str(tmp_path / "adapters"))
    np.testing.assert_allclose(adapted[path], merged[path], rtol=0, atol=0.01 * float(np.abs(before[path]).max()))
