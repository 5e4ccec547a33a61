"""Files that place or share their experts in another way than the families support."""

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
    "pattern": ("exaone-moe", {"layer_types": None, "sliding_window_pattern": "LG"}, "sliding_window_pattern"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_family_cannot_express_is_an_error(name):
    model, changes, key = REFUSED[name]
    data = json.loads((HF_FIXTURES / model / "config.json").read_text()) | changes
    with pytest.raises(ConfigError) as caught:
        family(data["model_type"]).resolve(data)
    assert [p.path for p in caught.value.problems] == [f"config.json: {key}"]


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
