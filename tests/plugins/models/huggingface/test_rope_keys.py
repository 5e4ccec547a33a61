"""RoPE keys of `config.json`: all forms that transformers 4 and 5 write, and unsupported ones."""

import json

import pytest

from axlearn_core.config import get, patch
from axlearn_core.errors import ConfigError, RequestError
from axlearn_plugins_models.huggingface.family import Settings, family
from axlearn_plugins_models.huggingface.rope import read_rope, write_rope
from axlearn_plugins_rope.rotary import RotaryEmbedding
from axlearn_plugins_rope.scaling import LinearScaling, Llama3Scaling, NTKScaling, YarnScaling
from support.paths import HF_FIXTURES

POSITION = "model.decoder.layer.attention.position"
KEYS = ("rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def config(model, **changes):
    """Return the `config.json` of a fixture with other RoPE keys."""
    data = json.loads((HF_FIXTURES / model / "config.json").read_text())
    return {k: v for k, v in data.items() if k not in KEYS} | changes


def position(model, **changes):
    data = config(model, **changes)
    return get(family(data["model_type"]).resolve(data)[0].config, POSITION)


def thetas(model, **changes):
    """Return the thetas of the sliding and of the global layers."""
    near, *_, wide = position(model, **changes).children
    return near.theta, wide.theta


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 500_000},
        {"rope_parameters": None, "rope_scaling": None, "rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}, "partial_rotary_factor": 1.0},
    ],
    ids=str,
)
def test_one_encoding_for_all_layers(changes):
    node = position("llama3", **changes)
    assert (node.theta, node.scaling) == (5e5, None)


@pytest.mark.parametrize(("model", "theta"), [("llama2", 1e4), ("mixtral", 1e6), ("qwen3", 1e4), ("gemma2", 1e4)])
def test_a_file_without_theta_means_what_transformers_takes_then(model, theta):
    assert position(model).theta == theta


NESTED = {"full_attention": {"rope_type": "linear", "rope_theta": 2e6, "factor": 8.0},
          "sliding_attention": {"rope_type": "default", "rope_theta": 3e4}}  # fmt: skip


def test_gemma3_has_one_for_each_kind_of_layers():
    assert thetas("gemma3", rope_parameters=NESTED) == (3e4, 2e6)
    *_, wide = position("gemma3", rope_parameters=NESTED).children
    assert wide.scaling == LinearScaling(factor=8.0)
    v4 = {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert position("gemma3", **v4) == position("gemma3", rope_parameters=NESTED)
    assert position("gemma3", **v4, rope_parameters=NESTED) == position("gemma3", **v4)
    assert thetas("gemma3") == (1e4, 1e6)
    without = {kind: {"rope_type": "default"} for kind in NESTED}
    assert thetas("gemma3", rope_parameters=without) == (1e4, 1e6)
    assert thetas("gemma3", rope_parameters=without, rope_theta=2e6, rope_local_base_freq=3e4) == (3e4, 2e6)


REFUSED = {
    "nested": ("llama3", {"rope_parameters": NESTED}, ["rope_parameters", "got: entries for full_attention, sliding"]),
    "nested-gemma2": ("gemma2", {"rope_parameters": NESTED}, ["expected: one entry for all layers"]),
    "nested-one": ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 5e6}}}, ["for full_attention"]),
    "flat": ("gemma3", {"rope_parameters": {"rope_theta": 1e6}}, [
        "got: entries for rope_theta", "expected: entries for sliding_attention, full_attention"
    ]),
    "lacking-kind": ("gemma3", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, [
        "got: entries for full_attention", "expected: entries for sliding_attention, full_attention"
    ]),
    "another-kind": ("gemma3", {"rope_parameters": {**NESTED, "chunked_attention": {}}}, ["chunked_attention"]),
    "mixed": ("gemma3", {"rope_parameters": {**NESTED, "sliding_attention": 3}}, ["an object for each of"]),
    "list": ("llama3", {"rope_parameters": [1]}, ["rope_parameters", "got: [1]", "expected: an object"]),
    "type": ("llama3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["got: dynamic"]),
    "type-4": ("llama3", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, ["got: longrope"]),
    "type-nested": ("gemma3", {"rope_parameters": {**NESTED, "full_attention": {"rope_type": "dynamic"}}}, [
        "got: dynamic"
    ]),
    "two-types": ("llama3", {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}}, [
        "rope_type: has two values", "got: rope_scaling.type: yarn, rope_scaling.rope_type: linear"
    ]),
    "two-thetas": ("llama3", {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, [
        "config.json: rope_theta: has two values", "got: rope_parameters.rope_theta: 500000.0, rope_theta: 10000.0",
        "transformers 5 uses rope_parameters.rope_theta",
    ]),
    "two-thetas-near": ("gemma3", {"rope_parameters": NESTED, "rope_local_base_freq": 1e4}, [
        "got: rope_parameters.sliding_attention.rope_theta: 30000.0, rope_local_base_freq: 10000.0"
    ]),
    "two-thetas-wide": ("gemma3", {"rope_parameters": NESTED, "rope_theta": 1e6}, [
        "got: rope_parameters.full_attention.rope_theta: 2000000.0, rope_theta: 1000000.0"
    ]),
    "two-factors": ("llama3", {"rope_parameters": YARN, "rope_scaling": {**YARN, "factor": 8.0}}, ["factor: has two"]),
    "unknown-key": ("llama3", {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24]}}, [
        "rope_parameters.mrope_section", "for rope_type default: rope_type, rope_theta"
    ]),
    "key-of-another-type": ("llama3", {"rope_parameters": {"rope_theta": 1e4, "factor": 8.0}}, [
        "rope_parameters.factor", "got: 8.0"
    ]),
    "misspelled": ("llama3", {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fst": 32}}, [
        "config.json: rope_scaling.beta_fst: rope_type yarn does not have this entry", "got: 32", "did you mean: beta_fast"
    ]),
    "misspelled-nested": ("gemma3", {"rope_parameters": {**NESTED, "full_attention": {"rope_thta": 1e6}}}, [
        "config.json: rope_parameters.full_attention.rope_thta", "did you mean: rope_theta"
    ]),
    "part": ("llama3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "got: 0.5"]),
    "part-4": ("llama3", {"partial_rotary_factor": 0.25}, ["partial_rotary_factor", "got: 0.25"]),
    "no-factor": ("llama3", {"rope_parameters": {"rope_type": "linear"}}, [
        "rope_parameters.factor: rope_type linear needs a positive number", "got: nothing"
    ]),
    "no-number": ("llama3", {"rope_theta": "1e6"}, ["rope_parameters.rope_theta", "got: '1e6'"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused(name):
    model, changes, expected = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        position(model, **changes)
    assert all(text in str(caught.value) for text in expected), caught.value


SCALINGS = {
    "default": None,
    "linear": LinearScaling(factor=4.0),
    "llama3": Llama3Scaling(factor=8.0, original_length=64),
    "yarn": YarnScaling(factor=4.0, original_length=32, attention_factor=1.5, truncate=False),
}


def read_by_4(data):
    """Return the frequencies for a reader that ignores `rope_parameters`."""
    return read_rope(Settings({k: v for k, v in data.items() if k != "rope_parameters"}))


def read_by_5(data):
    """Return the frequencies for a reader that reads no other keys."""
    return read_rope(Settings({"rope_parameters": data["rope_parameters"]}))


@pytest.mark.parametrize("kind", SCALINGS)
def test_an_export_is_read_by_transformers_4_and_5(kind):
    resolved, _ = family("llama").resolve(config("llama3", rope_theta=5e5))
    changed = patch(resolved.config, {f"{POSITION}.scaling": SCALINGS[kind]})
    data = family("llama").config_json(changed)
    assert data["rope_parameters"]["rope_type"] == kind
    assert data["rope_theta"] == 5e5
    assert ("rope_scaling" in data) == (kind != "default")
    assert read_by_4(data) == read_by_5(data)
    read = family("llama").resolve({**config("llama3"), **{k: data[k] for k in KEYS if k in data}})[0]
    assert get(read.config, POSITION) == get(changed, POSITION)


@pytest.mark.parametrize(
    ("model", "changes", "fraction"),
    [
        ("nemotron", {"rope_parameters": None}, 0.5),
        ("nemotron", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, 0.25),
        ("nemotron", {"rope_parameters": None, "partial_rotary_factor": 1.0}, 1.0),
        ("gpt-neox", {"rope_parameters": None, "rotary_pct": 0.5}, 0.5),
        ("gpt-neox", {"rope_parameters": None}, 0.25),
    ],
)
def test_the_share_of_a_head_that_rotates(model, changes, fraction):
    assert position(model, **changes).fraction == fraction
    data = config(model, **changes)
    written = family(data["model_type"]).config_json(family(data["model_type"]).resolve(data)[0].config)
    share = "rotary_pct" if model == "gpt-neox" else "partial_rotary_factor"
    assert written[share] == written["rope_parameters"]["partial_rotary_factor"] == fraction


def test_a_scaling_that_no_rope_type_describes():
    with pytest.raises(RequestError, match=r"scaling NTKScaling[\s\S]*expected: LinearScaling"):
        write_rope(RotaryEmbedding.Config(scaling=NTKScaling(factor=2.0)))


def test_two_shares_of_a_head():
    changes = {"rotary_pct": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}}
    expected = r"partial_rotary_factor: has two values[\s\S]*partial_rotary_factor: 0\.25, rotary_pct: 0\.5"
    with pytest.raises(ConfigError, match=expected):
        position("gpt-neox", **changes)


def test_an_export_of_gemma3_is_read_by_both():
    original = position("gemma3", rope_parameters=NESTED)
    data = config("gemma3", rope_parameters=NESTED)
    written = family("gemma3_text").config_json(family("gemma3_text").resolve(data)[0].config)
    assert written["rope_parameters"] == NESTED
    four = {k: written[k] for k in KEYS if k in written and k != "rope_parameters"}
    assert four == {
        "rope_theta": 2e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 3e4
    }  # fmt: skip
    assert position("gemma3", **four) == original
    assert position("gemma3", rope_parameters=written["rope_parameters"]) == original


@pytest.mark.slow_cases("gemma3")
@pytest.mark.parametrize("model", ["llama3", "qwen3", "gemma2", "gemma3", "deepseek-v3", "mixtral"])
def test_what_was_imported_from_one_version_is_exported_for_both(model):
    """An unchanged run is exported with the form that its config.json lacks."""
    data = json.loads((HF_FIXTURES / model / "config.json").read_text())
    one = family(data["model_type"])
    assert "rope_theta" not in data
    both = data | one.compatibility_keys(data)
    assert {k: both[k] for k in data} == data, "existing keys must not change"
    four = {k: v for k, v in both.items() if k != "rope_parameters"}
    original = get(one.resolve(data)[0].config, POSITION)
    assert get(one.resolve(both)[0].config, POSITION) == original
    assert get(one.resolve(four)[0].config, POSITION) == original
    assert one.compatibility_keys(both) == {}
