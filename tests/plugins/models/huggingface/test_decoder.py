import attrs
import pytest

from axlearn_core.config import find
from axlearn_core.errors import ConfigError
from axlearn_plugins_models.huggingface.family import family, find_family
from axlearn_plugins_transformer.alternate import layer_configs

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2}  # fmt: skip
ATTENTION = "model.decoder.layer.attention"


def config(model_type, **keys):
    return family(model_type).resolve({**SIZES, **keys})[0].config


def layers(model_type, **keys):
    return [layer.attention for layer in layer_configs(config(model_type, **keys).model.decoder.layer, 4)]


def test_a_part_of_each_head_may_rotate():
    position = config("phi3", partial_rotary_factor=0.75).model.decoder.layer.attention.position
    assert position.fraction == 0.75
    written = family("phi3").config_json(config("phi3", partial_rotary_factor=0.75))
    assert written["partial_rotary_factor"] == written["rope_parameters"]["partial_rotary_factor"] == 0.75
    assert config("glm", head_dim=8).model.decoder.layer.attention.position.fraction == 0.5
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        config("llama", partial_rotary_factor=0.5)


@pytest.mark.parametrize(("model_type", "adjacent"), [("ernie4_5", True), ("cohere", True), ("llama", False)])
def test_adjacent_elements_rotate_in_some_families(model_type, adjacent):
    assert config(model_type).model.decoder.layer.attention.position.interleaved is adjacent


def test_biases_are_read_and_written():
    biased = config("llama", attention_bias=True)
    assert {*find(biased, f"{ATTENTION}.*.bias").values()} == {True}
    assert {*find(biased, "model.decoder.layer.feed_forward.*.bias").values()} == {False}
    assert find_family(biased)[1]["attention_bias"] is True


def test_layer_types_place_windows_and_positions():
    kinds = ["full_attention", "sliding_attention"] * 2
    attention = layers("cohere2", layer_types=kinds, sliding_window=8)
    assert [a.window.size for a in attention] == [None, 8] * 2
    assert [a.position is None for a in attention] == [True, False] * 2
    written = family("cohere2").config_json(config("cohere2", layer_types=kinds, sliding_window=8))
    assert (written["layer_types"], written["sliding_window"]) == (kinds, 8)


@pytest.mark.parametrize(
    ("model_type", "wrong", "message"),
    [
        ("olmo3", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ("cohere2", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("ministral3", {"rope_parameters": None}, "rope_parameters or rope_scaling"),
        ("ministral3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "llama_4_scaling_beta"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
    ],
)
def test_values_that_a_family_cannot_honour_are_errors(model_type, wrong, message):
    with pytest.raises(ConfigError, match=message):
        config(model_type, **wrong)


def test_a_model_keeps_the_type_that_it_was_imported_with():
    imported = attrs.evolve(config("phi3"), name="phi3")
    assert find_family(imported)[0].model_type == "phi3"
    assert find_family(config("phi3"))[0].model_type == "llama"
