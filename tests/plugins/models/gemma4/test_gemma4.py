"""Keys of Gemma 4's `config.json`, and errors for unsupported values."""

import json

import pytest

from axlearn_core.errors import ConfigError
from axlearn_plugins_models.gemma4.huggingface import Gemma4
from axlearn_plugins_models.huggingface.family import family
from support.paths import HF_FIXTURES

REFUSED = {
    "both-directions": ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    "no-keys": ({"num_kv_shared_layers": 3}, "num_kv_shared_layers"),
    "no-layers": ({"num_kv_shared_layers": 5}, "num_kv_shared_layers"),
    "two-head-sizes": ({"per_layer_config": {"2": {"head_dim": 16}}}, "per_layer_config"),
    "another-window": ({"per_layer_config": {"0": {"sliding_window": 4}}}, "per_layer_config"),
    "two-vocabularies": ({"vocab_size_per_layer_input": 64}, "vocab_size_per_layer_input"),
    "biases": ({"attention_bias": True}, "attention_bias"),
}


def read(name):
    return json.loads((HF_FIXTURES / name / "config.json").read_text())


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_family_cannot_express_is_an_error(name):
    changes, key = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        Gemma4().resolve(read("gemma4") | changes)
    assert [p.path for p in caught.value.problems] == [f"config.json: {key}"]


@pytest.mark.parametrize("name", ["gemma4", "gemma4-moe"])
def test_published_files_state_the_sizes_of_global_layers_once(name):
    data, one = read(name), family("gemma4_text")
    layers = data.pop("per_layer_config")
    wide = layers[str(data["num_hidden_layers"] - 1)]
    sizes = {"global_head_dim": wide["head_dim"], "num_global_key_value_heads": wide.get("num_key_value_heads")}
    config = one.resolve(data | {"per_layer_config": layers})[0].config
    assert one.resolve(data | sizes)[0].config == config
    written = one.config_json(config)
    assert (written["global_head_dim"], written["head_dim"]) == (16, 8)
    assert one.resolve(written)[0].config == config


def test_the_last_layer_is_global():
    data = read("gemma4-moe") | {"layer_types": ["sliding_attention"] * 3, "per_layer_config": None}
    one = family("gemma4_text")
    assert isinstance(one, Gemma4)
    written = one.config_json(one.resolve(data)[0].config)
    assert written["layer_types"] == ["sliding_attention"] * 2 + ["full_attention"]
