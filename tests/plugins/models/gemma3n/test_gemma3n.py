"""Keys of Gemma 3n's `config.json`, and errors for unsupported values."""

import json

import pytest

from axlearn_core.errors import ConfigError
from axlearn_plugins_models.gemma3n.huggingface import Gemma3n
from axlearn_plugins_models.huggingface.family import family
from axlearn_plugins_models.huggingface.layer_cycle import each_value
from support.paths import HF_FIXTURES

REFUSED = {
    "another-active-stream": ({"altup_active_idx": 1}, "altup_active_idx"),
    "no-keys": ({"num_kv_shared_layers": 3}, "num_kv_shared_layers"),
    "too-few-sizes": ({"intermediate_size": [16, 16]}, "intermediate_size"),
    "too-few-shares": ({"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern"),
    "one-share": ({"activation_sparsity_pattern": 0.5}, "activation_sparsity_pattern"),
    "biases": ({"attention_bias": True}, "attention_bias"),
}


def read():
    return json.loads((HF_FIXTURES / "gemma3n" / "config.json").read_text())


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_family_cannot_express_is_an_error(name):
    changes, key = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        Gemma3n().resolve(read() | changes)
    assert [p.path for p in caught.value.problems] == [f"config.json: {key}"]


def test_the_first_ten_layers_are_sparse_by_default():
    """As in `Gemma3nTextConfig` of transformers."""
    data = {k: v for k, v in read().items() if k not in ("activation_sparsity_pattern", "layer_types")}
    decoder = Gemma3n().resolve(data | {"num_hidden_layers": 12, "intermediate_size": 16})[0].config.model.decoder
    layers = each_value(decoder.layer.feed_forward, 12)
    assert [one.form and one.form.sparsity for one in layers] == [0.95] * 10 + [None] * 2
    windows = [one.window for one in each_value(decoder.layer.attention, 12)]
    assert windows == [None if i % 5 == 4 else 8 for i in range(12)]
    shallow = Gemma3n().resolve(data | {"num_hidden_layers": 7, "intermediate_size": 16})[0].config.model.decoder
    assert {one.form for one in each_value(shallow.layer.feed_forward, 7)} == {None}


def test_the_keys_are_exported():
    data, one = read(), family("gemma3n_text")
    config = one.resolve(data)[0].config
    written = one.config_json(config)
    for key in (
        "activation_sparsity_pattern", "altup_num_inputs", "altup_coef_clip", "altup_correct_scale", "intermediate_size",
        "laurel_rank", "layer_types", "num_kv_shared_layers", "vocab_size_per_layer_input", "rope_parameters",
    ):  # fmt: skip
        assert written[key] == data[key], key
    assert one.resolve(written)[0].config == config
