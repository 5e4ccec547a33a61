"""The family and the experiments. The tests in `tests/plugins/models` compare the fixtures with transformers."""

import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import axlearn_core as ax
from axlearn_core.extend import ConfigError, Functional, find
from axlearn_plugins_models.huggingface.family import family, find_family
from axlearn_plugins_models.huggingface.source import open_model
from support.mesh_losses import losses_on_mesh
from support.paths import HF_FIXTURES

TOY = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
       "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
       "linear_value_head_dim": 12, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
       "shared_expert_intermediate_size": 40}  # fmt: skip
SMALL = {"input.batch_size": 8, "input.sequence_length": 32, "evaluators": {}, "model.vocab_size": 2048}
DEVICES = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")


def test_the_published_size():
    config = ax.resolve("qwen3-next-80b-a3b").config
    count = sum(leaf.size for leaf in jax.tree.leaves(Functional.from_config(config.model).abstract))
    assert round(count / 1e9, 1) == 79.7
    family, data = find_family(config)
    assert (family.model_type, data["full_attention_interval"]) == ("qwen3_next", 4)
    assert data["rope_parameters"]["partial_rotary_factor"] == 0.25


@pytest.mark.parametrize(
    "wrong", [{"layer_types": ["full_attention"] * 2 + ["linear_attention"] * 3}, {"full_attention_interval": 1}]
)
def test_other_orders_of_layers_raise_an_error(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        family("qwen3_next").resolve({**TOY, **wrong})


@pytest.mark.slow
def test_layers_that_predict_more_tokens_are_ignored(tmp_path):
    folder = shutil.copytree(HF_FIXTURES / "qwen3-next", tmp_path / "toy")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "mtp.fc.weight": np.zeros((4, 4), np.float32)}, folder / "model.safetensors")
    assert "mtp.fc.weight" not in open_model(folder).tensors


@pytest.mark.slow
@pytest.mark.parametrize("feature", ["lora", "quantization"])
def test_features_apply_to_the_new_parts_and_train(feature, tmp_path):
    config = ax.resolve("qwen3-next-toy", with_=[feature]).config
    changed = find(config, "model.decoder.layer.attention.children.3.output_gate.**")
    assert changed != find(
        ax.resolve("qwen3-next-toy").config, "model.decoder.layer.attention.children.3.output_gate.**"
    )
    result = ax.train("qwen3-next-toy", with_=[feature], set=SMALL, steps=2, run_dir=tmp_path / "run")
    assert result.step == 2


# Pipelines compute the loss of the router for each microbatch.
ON_MESHES = {**SMALL, "model.decoder.layer.feed_forward.router.load_balance": 0.0, "model.decoder.num_layers": 8}


@DEVICES
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "features"),
    [({"fsdp": 2, "tensor": 2}, ()), ({"expert": 4}, ()), ({"pipeline": 2}, ("pipeline:microbatches=4",))],
)
def test_a_mesh_gives_the_loss_of_one_device(shape, features):
    one = losses_on_mesh("qwen3-next-toy", {"fsdp": 1}, **ON_MESHES)
    np.testing.assert_allclose(losses_on_mesh("qwen3-next-toy", shape, *features, **ON_MESHES), one, rtol=1e-4)
