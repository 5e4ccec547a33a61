"""Adapters in PEFT's format: PEFT's formula on the exported base gives the weights of the merged model."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import axlearn_core as ax
from axlearn_core.compose import Functional
from axlearn_core.config import patch
from axlearn_core.errors import RequestError
from axlearn_core.run import derive_run
from axlearn_plugins_finetune.lora.adapters import merge, scales_of, split
from axlearn_plugins_finetune.lora.merge import merge_run
from axlearn_plugins_models.huggingface.import_export import export_run
from axlearn_plugins_models.huggingface.peft import adapter_config, export_peft, files
from support.needs import require

SIZES = {
    "model.vocab_size": 64,
    "model.decoder.num_layers": 2,
    "model.decoder.hidden_dim": 32,
    "model.decoder.layer.attention.num_heads": 4,
    "model.decoder.layer.attention.num_kv_heads": 2,
    "model.decoder.layer.feed_forward.hidden_dim": 48,
    "learner.optimizer": {"type": "adamw", "learning_rate": 0.01},
}


def modules(config):
    """Return (parameters for a run of the config, scales of its adapters); no parameter is zero."""
    model = Functional.from_config(config.model)
    rng = np.random.default_rng(0)
    params = {p: jnp.asarray(rng.normal(size=s.shape) * 0.1, s.dtype) for p, s in model.abstract.items()}
    return params, scales_of(model.bind(model.abstract))


def peft_files(config, **options):
    return files(config, *modules(config), **options)


@pytest.fixture(scope="module")
def config():
    return ax.resolve("quickstart", with_=["lora:rank=3,alpha=6,target=model.**"], set=SIZES).config


def module(arrays, name):
    """Return PEFT's update of a module: alpha / r * B A."""
    a, b = (np.asarray(arrays[f"base_model.model.{name}.lora_{m}.weight"], np.float64) for m in "AB")
    return 6 / 3 * b @ a


def test_the_arrays_are_what_peft_adds_to_the_weights(config):
    params, scales = modules(config)
    arrays, facts = files(config, params, scales, base="some/base")
    assert (facts["peft_type"], facts["r"], facts["lora_alpha"]) == ("LORA", 3, 6)
    assert facts["base_model_name_or_path"] == "some/base"
    names = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert facts["target_modules"] == names
    assert (facts["rank_pattern"], facts["alpha_pattern"]) == ({}, {})
    assert len(arrays) == 2 * 2 * len(names)
    assert arrays["base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"].shape == (3, 32)
    assert arrays["base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"].shape == (16, 3)

    merged = merge(params, scales)
    added = {p: np.asarray(merged[p], np.float64) - np.asarray(params[p], np.float64) for p in merged}
    for layer in range(2):
        attention, feed_forward = (f"decoder.layer.{n}" for n in ("attention", "feed_forward"))
        prefix = f"model.layers.{layer}"
        query = added[f"{attention}.query.weight"][layer].reshape(32, 32).T  # d (n h) -> (n h) d
        output = added[f"{attention}.output.weight"][layer].reshape(32, 32).T  # (n h) d -> d (n h)
        down = added[f"{feed_forward}.down.weight"][layer].T
        for name, expected in (("self_attn.q_proj", query), ("self_attn.o_proj", output), ("mlp.down_proj", down)):
            np.testing.assert_allclose(module(arrays, f"{prefix}.{name}"), expected, atol=1e-6)


def test_different_ranks_become_patterns_and_other_modules_get_no_adapter(config):
    query = "model.decoder.layer.attention.query"
    facts = peft_files(patch(config, {f"{query}.rank": 5, f"{query}.alpha": 2.5}))[1]
    assert (facts["r"], facts["lora_alpha"]) == (3, 6)
    queries = {f"model.layers.{i}.self_attn.q_proj" for i in range(2)}
    assert facts["rank_pattern"] == dict.fromkeys(queries, 5)
    assert facts["alpha_pattern"] == dict.fromkeys(queries, 2.5)
    some = adapter_config(
        {"a.0.q": 2, "a.0.k": 2, "a.1.k": 2}, {"a.0.q": 4}, {"a.0.q", "a.1.q", "a.0.k", "a.1.k"}, None
    )
    assert some["target_modules"] == ["a.0.q", "k"]


def test_a_model_that_the_format_does_not_have_is_refused(config):
    other = patch(config, {"model.decoder.layer.attention.softcap": 30.0})
    with pytest.raises(RequestError, match="no family describes this whole model"):
        peft_files(other)


def run_of(directory, config):
    """Make a run at step 1."""
    return write(directory, config, modules(config)[0])


def write(directory, config, params):
    return derive_run(SimpleNamespace(step=1), directory, config, lambda _: params)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_peft_computes_the_same(config, tmp_path):
    torch, transformers = require("torch"), require("transformers")
    peft = require("peft")
    run = run_of(tmp_path / "run", config)
    merge_run(run, tmp_path / "merged")
    export_peft(run, tmp_path / "peft", base=str(tmp_path / "hf"))
    dense = ax.load(tmp_path / "merged")
    write(tmp_path / "base", dense.config, split(modules(config)[0])[0])
    export_run(tmp_path / "base", tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "peft")
    tokens = np.random.default_rng(0).integers(0, 64, (2, 12))
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.numpy()
    ours = np.asarray(dense.model(jnp.asarray(tokens, jnp.int32)))
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())
    with pytest.raises(RequestError, match="has no adapters to write"):
        export_peft(tmp_path / "merged", tmp_path / "out")
