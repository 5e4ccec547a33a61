"""The family and the experiments. The tests in `tests/plugins/models` compare the fixtures with transformers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import axlearn_core as ax
from axlearn_core.extend import ConfigError, Functional, compose
from axlearn_plugins_gpt_oss.experiments import PUBLISHED, YARN
from axlearn_plugins_models.huggingface.family import family, find_family
from axlearn_plugins_models.huggingface.source import open_model
from axlearn_plugins_quantization.feature import weight_only_config
from axlearn_plugins_quantization.store import quantize_params
from support.mesh_losses import losses_on_mesh

TOY = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
       "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "sliding_window": 5,
       "rope_parameters": {**YARN, "factor": 4.0, "original_max_position_embeddings": 8}}  # fmt: skip
PROMPT = [5, 17, 3, 80, 41, 9, 9, 22]
FLOAT32 = ["model.dtype=float32"]
SMALL = {"input.batch_size": 8, "input.sequence_length": 32, "evaluators": {}, "model.vocab_size": 2048}
DEVICES = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")


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
    dense = bind(tmp_path)(jnp.asarray([PROMPT]))[0]
    np.testing.assert_allclose(dense, logits(model), rtol=1e-3, atol=1e-3)
    # As integers with a scale for 32 inputs, as in the file, the experts stay exact.
    source = open_model(tmp_path, set=[*FLOAT32, "model.decoder.stack.mode=unrolled"])
    state = compose(source.config, jax.devices()[:1]).state
    config = weight_only_config(source.config, "int8", tile_size=32, target="model.**.feed_forward.*")
    functional = Functional.from_config(config.model)
    params = quantize_params(source.read({**state.params, **state.variables}), functional)
    assert {str(x.dtype) for path, x in params.items() if path.endswith("feed_forward.up.weight")} == {"int8"}
    np.testing.assert_array_equal(functional.bind(params, {})(jnp.asarray([PROMPT]))[0], dense)


@pytest.mark.slow
@pytest.mark.parametrize("feature", ["lora", "quantization"])
def test_features_apply_to_the_new_parts_and_train(feature, tmp_path):
    config = ax.resolve("gpt-oss-toy", with_=[feature]).config
    assert config.model.decoder.layer.attention.sinks is not None
    result = ax.train("gpt-oss-toy", with_=[feature], set=SMALL, steps=2, run_dir=tmp_path / "run")
    assert result.step == 2


# Pipelines compute the loss of the router for each microbatch.
ON_MESHES = {**SMALL, "model.decoder.layer.feed_forward.router.load_balance": 0.0}


@DEVICES
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "features"),
    [({"fsdp": 2, "tensor": 2}, ()), ({"expert": 4}, ()), ({"pipeline": 2}, ("pipeline:microbatches=4",))],
)
def test_a_mesh_gives_the_loss_of_one_device(shape, features):
    one = losses_on_mesh("gpt-oss-toy", {"fsdp": 1}, **ON_MESHES)
    np.testing.assert_allclose(losses_on_mesh("gpt-oss-toy", shape, *features, **ON_MESHES), one, rtol=1e-4)
