"""Files that place or share their experts or keys in another way than the families support."""

import json

import pytest

from axlearn_core.errors import ConfigError
from axlearn_plugins_models.huggingface.family import family
from support.paths import HF_FIXTURES

REFUSED = {
    "dense-above": ("glm4-moe-lite", {"mlp_layer_types": ["dense", "sparse", "dense"]}, "mlp_layer_types"),
    "all-dense": ("glm4-moe", {"first_k_dense_replace": 3}, "first_k_dense_replace"),
    "moe-layers": ("llama4", {"moe_layers": [0]}, "moe_layers"),
    "experts-end": ("ernie4-5-moe", {"moe_layer_end_index": 2}, "moe_layer_end_index"),
    "linear-attention": ("minimax-m2", {"attn_type_list": [1, 0]}, "attn_type_list"),
    "expert-sizes": ("hunyuan-moe", {"moe_intermediate_size": [16, 24]}, "moe_intermediate_size"),
    "shared-sizes": ("hunyuan-moe", {"num_shared_expert": 2}, "num_shared_expert"),
    "first-shares": ("glm-moe-dsa", {"indexer_types": ["shared", "full", "full"]}, "indexer_types"),
    "dense-attention": ("deepseek-v32", {"layer_types": ["full_attention"] * 2}, "layer_types"),
    "both-directions": ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    "no-keys": ("gemma4", {"num_kv_shared_layers": 3}, "num_kv_shared_layers"),
    "no-layers": ("gemma4", {"num_kv_shared_layers": 5}, "num_kv_shared_layers"),
    "two-head-sizes": ("gemma4", {"per_layer_config": {"2": {"head_dim": 16}}}, "per_layer_config"),
    "another-window": ("gemma4", {"per_layer_config": {"0": {"sliding_window": 4}}}, "per_layer_config"),
    "two-vocabularies": ("gemma4", {"vocab_size_per_layer_input": 64}, "vocab_size_per_layer_input"),
    "biases": ("gemma4", {"attention_bias": True}, "attention_bias"),
    "pattern": ("exaone-moe", {"layer_types": None, "sliding_window_pattern": "LG"}, "sliding_window_pattern"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_family_cannot_express_is_an_error(name):
    model, changes, key = REFUSED[name]
    data = json.loads((HF_FIXTURES / model / "config.json").read_text()) | changes
    with pytest.raises(ConfigError) as caught:
        family(data["model_type"]).resolve(data)
    assert [p.path for p in caught.value.problems] == [f"config.json: {key}"]


@pytest.mark.parametrize("name", ["gemma4", "gemma4-moe"])
def test_published_files_of_gemma_4_state_the_sizes_of_global_layers_once(name):
    data = json.loads((HF_FIXTURES / name / "config.json").read_text())
    one, layers = family("gemma4_text"), data.pop("per_layer_config")
    wide = layers[str(data["num_hidden_layers"] - 1)]
    published = data | {
        "global_head_dim": wide["head_dim"],
        "num_global_key_value_heads": wide.get("num_key_value_heads"),
    }
    config = one.resolve(data | {"per_layer_config": layers})[0].config
    assert one.resolve(published)[0].config == config
    written = one.config_json(config)
    assert {written[key] for key in ("global_head_dim", "head_dim")} == {16, 8}
    assert one.resolve(written)[0].config == config


def test_indexers_follow_the_pattern_of_the_file():
    data = json.loads((HF_FIXTURES / "glm-moe-dsa/config.json").read_text())
    del data["indexer_types"]
    for changes, expected in (
        ({}, ["full"] * 3),
        ({"index_topk_pattern": "FSS"}, ["full", "shared", "shared"]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, ["full", "shared", "full"]),
    ):
        one = family("glm_moe_dsa")
        assert one.config_json(one.resolve(data | changes)[0].config)["indexer_types"] == expected
