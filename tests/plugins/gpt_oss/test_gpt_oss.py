"""Tests of the layer, the family and the experiments."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import axlearn_core as ax
from axlearn_core.extend import ConfigError, Functional, Mesh, compose
from axlearn_plugins_gpt_oss.experiments import PUBLISHED, YARN
from axlearn_plugins_models.huggingface.family import family, find_family
from axlearn_plugins_models.huggingface.import_export import export_run, import_run
from axlearn_plugins_models.huggingface.source import open_model

TOY = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
       "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "sliding_window": 5,
       "rope_parameters": {**YARN, "factor": 4.0, "original_max_position_embeddings": 8}}  # fmt: skip
PROMPT = [5, 17, 3, 80, 41, 9, 9, 22]
FLOAT32 = ["model.dtype=float32"]
SMALL = {"input.batch_size": 8, "input.sequence_length": 32, "evaluators": {}, "model.vocab_size": 2048}
DEVICES = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Return a random model that transformers writes, with its logits and its greedy tokens."""
    torch, transformers = (
        pytest.importorskip("torch", reason="needs torch"),
        pytest.importorskip("transformers", reason="needs transformers"),
    )
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**TOY)).eval()
    with torch.no_grad():
        for weight in model.parameters():  # norms too are not the identity
            weight += 0.1 * torch.randn_like(weight)
        prompt = torch.tensor([PROMPT])
        logits = model(prompt).logits[0].numpy()
        tokens = model.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=0)[0, len(PROMPT) :].tolist()
    folder = tmp_path_factory.mktemp("toy")
    model.save_pretrained(folder)
    vocabulary = {"<|endoftext|>": 0, **{f"w{i}": i for i in range(1, TOY["vocab_size"])}}
    words = tokenizers.models.WordLevel(vocabulary, unk_token="w1")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    return folder, logits, tokens


@pytest.fixture(scope="module")
def imported(toy):
    """Return the bound model of the directory."""
    return bind(toy[0])


def test_the_published_size():
    config = ax.resolve("gpt-oss-20b").config
    count = sum(leaf.size for leaf in jax.tree.leaves(Functional.from_config(config.model).abstract))
    assert round(count / 1e9, 1) == 20.9
    family, data = find_family(config)
    assert (family.model_type, data["sliding_window"], data["swiglu_limit"]) == ("gpt_oss", 128, 7.0)
    assert data["layer_types"][:2] == ["sliding_attention", "full_attention"]


def test_the_published_config_json_is_the_experiment():
    """The published file has the old keys of the position encoding."""
    published = {k: v for k, v in PUBLISHED.items() if k != "rope_parameters"} | {
        "rope_theta": 150_000, "rope_scaling": {k: v for k, v in YARN.items() if k != "rope_theta"},
        "layer_types": ["sliding_attention", "full_attention"] * 12, "experts_per_token": 4, "initial_context_length": 4096,
        "attention_bias": True, "hidden_act": "silu", "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "max_position_embeddings": 131_072, "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    resolved, unread = family("gpt_oss").resolve(published)
    assert not unread
    assert resolved.config.model == ax.resolve("gpt-oss-20b").config.model


@pytest.mark.parametrize(
    "wrong",
    [
        {"layer_types": ["full_attention"] * 4},
        {"sliding_window": None},
        {"hidden_act": "gelu"},
        {"attention_bias": False},
    ],
)
def test_unsupported_values_raise_an_error(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        family("gpt_oss").resolve({**TOY, **wrong})


@pytest.mark.slow
def test_logits_and_greedy_tokens_are_those_of_transformers(toy, imported):
    _, logits, tokens = toy
    np.testing.assert_allclose(imported(jnp.asarray([PROMPT]))[0], logits, rtol=1e-4, atol=1e-4)
    assert list(imported.generate(PROMPT, max_tokens=16)) == tokens


def bind(directory):
    """Return the bound model of a directory, in float32."""
    source = open_model(directory, set=[*FLOAT32, "model.decoder.stack.mode=unrolled"])
    state = compose(source.config, jax.devices()[:1]).state
    return source.model.bind(source.read({**state.params, **state.variables}), {})


@pytest.mark.slow
def test_bfloat16_and_mxfp4_files_give_the_logits_of_transformers(tmp_path):
    """A model in bfloat16, then with its experts in MXFP4; transformers converts the same blocks to floating point."""
    torch, transformers = (
        pytest.importorskip("torch", reason="needs torch"),
        pytest.importorskip("transformers", reason="needs transformers"),
    )
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="needs transformers with MXFP4")
    torch.manual_seed(1)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**TOY | {"intermediate_size": 64})).to(
        torch.bfloat16
    )
    model.save_pretrained(tmp_path)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(TOY["vocab_size"])}, unk_token="w1")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))

    def logits(reference):
        with torch.no_grad():
            return reference.float().eval()(torch.tensor([PROMPT])).logits[0].numpy()

    path = tmp_path / "model.safetensors"
    stored, settings = safetensors.load_file(path), json.loads((tmp_path / "config.json").read_text())
    np.testing.assert_allclose(bind(tmp_path)(jnp.asarray([PROMPT]))[0], logits(model), rtol=1e-4, atol=1e-4)
    for name in [n for n in stored if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 126, blocks.shape[:-1], dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.get_parameter(name).data = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    safetensors.save_file(stored, path, {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({**settings, "quantization_config": {"quant_method": "mxfp4"}}))
    np.testing.assert_allclose(bind(tmp_path)(jnp.asarray([PROMPT]))[0], logits(model), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_the_paged_engine_gives_the_same_tokens(toy, imported):
    _, _, tokens = toy
    sizes = {
        "block_size": 4,
        "max_context": 32,
        "max_rows": 4,
        "max_step_tokens": 16,
        "chunk": 4,
        "row_buckets": (1,),
        "chunk_buckets": (1,),
    }
    with ax.serve(imported, set={f"runner.{k}": v for k, v in sizes.items()}, warm_up=False) as engine:
        generations = engine.generate([PROMPT, PROMPT[:3], PROMPT], max_tokens=16, temperature=0)
    expected = [tokens, list(imported.generate(PROMPT[:3], max_tokens=16)), tokens]
    assert [list(g.tokens) for g in generations] == expected


@pytest.mark.slow
def test_an_export_contains_the_same_tensors(toy, tmp_path):
    torch, transformers = (
        pytest.importorskip("torch", reason="needs torch"),
        pytest.importorskip("transformers", reason="needs transformers"),
    )
    import_run(toy[0], tmp_path / "run", set=FLOAT32)
    export_run(tmp_path / "run", tmp_path / "exported")
    before, after = (
        transformers.GptOssForCausalLM.from_pretrained(p).state_dict() for p in (toy[0], tmp_path / "exported")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
@pytest.mark.parametrize("feature", ["lora", "quantization"])
def test_features_apply_to_the_new_parts_and_train(feature, tmp_path):
    config = ax.resolve("gpt-oss-toy", with_=[feature]).config
    assert config.model.decoder.layer.attention.sinks is not None
    result = ax.train("gpt-oss-toy", with_=[feature], set=SMALL, steps=2, run_dir=tmp_path / "run")
    assert result.step == 2


def train(shape, *features):
    """Return the losses of three steps on a mesh."""
    # Pipelines compute this loss for each microbatch.
    unbalanced = {"model.decoder.layer.feed_forward.router.load_balance": 0.0}
    settings = {**SMALL, **unbalanced}
    config = ax.resolve("gpt-oss-toy", with_=features, set=settings).config
    config = ax.patch(config, {"mesh": Mesh(shape=shape, rules=config.mesh.rules)})
    program = compose(config, jax.devices()[: math.prod(shape.values())])
    rows = np.random.default_rng(0).integers(0, 2048, (8, 33))
    batch = program.put({"tokens": rows[:, :-1].astype(np.int32), "targets": rows[:, 1:].astype(np.int32)})
    state, losses = program.init(0), []
    for _ in range(3):
        state, summaries = program.train_step(state, batch)
        losses.append(float(summaries["loss"]))
    return losses


@DEVICES
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "features"),
    [({"fsdp": 2, "tensor": 2}, ()), ({"expert": 4}, ()), ({"pipeline": 2}, ("pipeline:microbatches=4",))],
)
def test_a_mesh_gives_the_loss_of_one_device(shape, features):
    np.testing.assert_allclose(train(shape, *features), train({"fsdp": 1}), rtol=1e-4)
