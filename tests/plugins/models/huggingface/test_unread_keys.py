"""Keys of `config.json` that a family does not read: those that change results are refused, and others are listed."""

import pytest

from axlearn_core.errors import ConfigError, RequestError
from axlearn_plugins_models.huggingface.source import open_model
from axlearn_plugins_models.huggingface.unread_keys import NEUTRAL, check_unread
from support.model_directories import edit_config, model_copy

EFFECTS = {
    "qk_norm": True,
    "logit_scale": 0.0625,
    "sliding_window": 8,
    "num_experts": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "clip_qkv": 3.0,
}
NO_EFFECTS = {
    "qk_norm": False,
    "logit_scale": 1,
    "num_experts": 0,
    "layer_types": ["full_attention"] * 2,
    "clip_qkv": None,
    "_unsloth_fixed": True,
    "transformers.js_config": {"dtype": "q4"},
}


@pytest.mark.parametrize("key", EFFECTS)
def test_a_key_that_changes_results_is_refused(key):
    with pytest.raises(ConfigError) as caught:
        check_unread(EFFECTS, [key], "llama")
    message = str(caught.value)
    assert f"config.json: {key}: the family 'llama' does not read this key" in message
    assert f"got: {EFFECTS[key]!r}" in message
    assert "expected: " in message
    assert "if the weights were trained without it, delete the key" in message


@pytest.mark.parametrize("key", ["qk_clip_tau", "attention_gate", "value_norm_type", "query_scaling", "num_sinks"])
def test_an_unknown_key_is_refused_by_its_name(key):
    with pytest.raises(ConfigError, match=rf"config.json: {key}: .* whose name suggests that it changes results"):
        check_unread({key: "sigmoid"}, [key], "llama")
    with pytest.raises(ConfigError, match=key):
        check_unread({key: True}, [key], "llama")
    check_unread({key: False}, [key], "llama")


def test_names_that_suggest_nothing_are_accepted():
    harmless = ["_gate_note", "attention_dropout", "embedding_size_hint", "output_router_logits", "use_flash_attention"]
    check_unread(dict.fromkeys(harmless, 7), harmless, "llama")


def test_a_key_that_changes_nothing_is_accepted():
    check_unread(NO_EFFECTS, NO_EFFECTS, "llama")
    check_unread({"sliding_window": 64, "max_position_embeddings": 64}, ["sliding_window"], "llama")
    check_unread({"sliding_window": 8, "use_sliding_window": False}, ["sliding_window"], "llama")
    check_unread(dict.fromkeys(NEUTRAL), NEUTRAL, "llama")


def test_a_file_of_a_newer_transformers(tmp_path):
    directory = model_copy("llama3", tmp_path)
    edit_config(directory, transformers_version="9.0.0", **NO_EFFECTS, experts_implementation="grouped")
    (note,) = [n for n in open_model(directory).notes if "were not read" in n]
    keys = sorted([*NO_EFFECTS, "experts_implementation"])
    assert note == f"these keys of config.json were not read: {', '.join(keys)}"
    edit_config(directory, qk_norm="per_head", logit_scale=0.5)
    with pytest.raises(RequestError) as caught:
        open_model(directory)
    assert all(text in str(caught.value) for text in ("qk_norm", "got: 'per_head'", "logit_scale", "got: 0.5"))
    assert caught.value.exit_code == 2
