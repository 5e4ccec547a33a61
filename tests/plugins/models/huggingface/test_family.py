"""Families: tables that cover the models in both directions, and weights sharded over many devices."""

import json
import shutil

import attrs
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from axlearn_core.compose import Functional, compose
from axlearn_core.config import get, patch
from axlearn_core.errors import RequestError
from axlearn_core.plugins import index
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_models.huggingface import stream
from axlearn_plugins_models.huggingface.family import PREFIX, Settings, family, find_family
from axlearn_plugins_models.huggingface.rope import read_rope
from axlearn_plugins_models.huggingface.source import open_model
from axlearn_plugins_models.huggingface.table import Axes
from axlearn_plugins_transformer.kernels.gated_linear_unit import ClampedForm, Swish
from support import model_table
from support.paths import HF_FIXTURES

MODELS = sorted(p.name for p in HF_FIXTURES.iterdir())


def bits(source):
    """Return name -> bytes in the files."""
    return {n: t.rows(0, t.shape[0] if t.shape else 1).tobytes() for n, t in source.stored.items()}


def written(source, params):
    """Return name -> bytes that an export would write."""
    outputs = [(n, source.stored[n].dtype, t.shape) for n, t in source.tensors.items()]
    actual = stream.values(source.tensors, params, [outputs])
    return {name: value.tobytes() for (name, _, _), value in zip(outputs, actual, strict=True)}


QUICK = {"deepseek-v3", "gemma3", "gpt2", "llama3", "qwen3-moe"}


@pytest.mark.fast_cases("llama3")
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_every_tensor_comes_back_and_the_config_too(name, monkeypatch):
    monkeypatch.setattr(stream, "SLICE", 1500)  # small slices, so that these tensors are read in several
    source = open_model(HF_FIXTURES / name)
    state = compose(source.config, jax.devices()[:1]).state
    params = source.read({**state.params, **state.variables})
    assert all(x.dtype == np.float32 for x in params.values())
    assert written(source, params) == bits(source)
    assert source.family.differences(source.data, source.config) == []
    assert source.notes == ()
    assert source.family.differences(source.family.config_json(source.config), source.config) == []


def test_a_family_that_is_not_installed_names_its_package(monkeypatch, tmp_path):
    monkeypatch.setattr(index, "read_packages", lambda group: {f"{PREFIX}bean": "bean-models"})
    (tmp_path / "config.json").write_text('{"model_type": "bean"}')
    for ask in (lambda: family("bean"), lambda: open_model(tmp_path)):
        with pytest.raises(RequestError) as caught:
            ask()
        assert str(caught.value) == (
            "the Hugging Face model_type 'bean' is not installed: bean-models provides it\n    fix: pip install bean-models"
        )


def test_a_relative_hidden_size_is_written_as_a_number():
    config = resolve("vit-tiny").config
    _, data = find_family(config)
    assert json.loads(json.dumps(data))["intermediate_size"] == 4 * config.model.hidden_dim


@pytest.mark.parametrize(
    ("experiment", "model_type"),
    [("gpt2-124m", "gpt2"), ("hunyuan-a13b", "hunyuan_v1_moe"), ("llama3-8b", "llama"), ("mixtral-8x7b", "mixtral")],
)
def test_the_most_specific_family_describes_a_model(experiment, model_type):
    assert find_family(resolve(experiment).config)[0].model_type == model_type


def test_another_form_of_the_same_layers_is_the_same_model():
    config = resolve("gemma2-2b").config  # local and global layers in turn
    slot = "model.decoder.layer.attention.window"
    window = get(config, slot)
    nodes = tuple(window.select(i) for i in range(6))
    longer = patch(config, {slot: attrs.evolve(window, first=nodes[:2], children=nodes[2:])})
    assert longer != config
    assert find_family(longer)[1] == find_family(config)[1]
    other = patch(
        config, {slot: attrs.evolve(window, first=nodes[:1], children=nodes[:2])}
    )  # two local layers at the start
    with pytest.raises(RequestError, match="no family describes this whole model"):
        find_family(other)


@pytest.mark.parametrize("name", [n for n in MODELS if n != "vit"])
def test_a_config_json_has_the_types_of_its_keys(name):
    """`transformers` does not load a Gemma whose `query_pre_attn_scalar` is 24.0."""
    data = json.loads((HF_FIXTURES / name / "config.json").read_text())
    written = family(data["model_type"]).config_json(family(data["model_type"]).resolve(data)[0].config)
    types = {k: type(v) for k, v in data.items() if v is not None and k in written}
    assert {k: type(written[k]) for k in types} == types


@pytest.mark.parametrize("model_type", ["llama", "mistral", "mixtral", "qwen2"])
def test_a_config_json_states_the_sizes_of_heads(model_type):
    """`transformers` does not load a Qwen2 whose `head_dim` is null."""
    name = {"llama": "llama2"}.get(model_type, model_type)
    data = json.loads((HF_FIXTURES / name / "config.json").read_text())
    heads, width = data["num_attention_heads"], data["hidden_size"]
    bare = {k: v for k, v in data.items() if k not in ("head_dim", "num_key_value_heads")}
    written = family(model_type).config_json(family(model_type).resolve(bare)[0].config)
    assert (written["head_dim"], written["num_key_value_heads"]) == (width // heads, heads)


@pytest.mark.fast_cases("gpt2")
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt2"])
def test_weights_are_placed_on_many_devices(name, monkeypatch):
    monkeypatch.setattr(stream, "SLICE", 1500)
    shape = {"expert": 2, "fsdp": 2, "tensor": 2} if name == "qwen3-moe" else {"fsdp": 4, "data": 2}
    source = open_model(HF_FIXTURES / name, set=["mesh.rules.vocab=[]", f"mesh.shape={shape}"])
    params = source.read(compose(source.config).state.params)
    assert any(not x.sharding.is_fully_replicated for x in params.values())
    one = source.read(compose(patch(source.config, {"mesh.shape": {}}), jax.devices()[:1]).state.params)
    assert all(np.array_equal(params[p], one[p]) for p in one)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_null_window_raises_an_error(name):
    """The window would otherwise be the default of `interleave`."""
    data = json.loads((HF_FIXTURES / name / "config.json").read_text())
    with pytest.raises(RequestError, match=r"does not have sliding_window\n    got: null"):
        family(data["model_type"]).resolve({**data, "sliding_window": None})


def test_a_family_without_new_layers_is_at_most_sixty_lines():
    counts = {name: model_table.lines(name) for name in model_table.text_types()}
    assert {n: k for n, k in counts.items() if k > model_table.MAX_LINES and n not in model_table.NEW_LAYERS} == {}
    assert model_table.NEW_LAYERS.keys() <= counts.keys()
    assert min(counts.values()) > 10  # the table and the experiment were both found


def test_qwen3_has_30_billion_parameters_and_uses_3():
    model = Functional.from_config(resolve("qwen3-30b-a3b").config.model)
    experts = sum(x.size for p, x in model.abstract.items() if "experts" in model.axes[p] and "router" not in p)
    assert round(model.num_parameters / 1e9, 1) == 30.5
    assert round((model.num_parameters - experts * (128 - 8) / 128) / 1e9, 2) in (3.3, 3.35)


@pytest.mark.slow
def test_a_run_that_was_not_imported_finds_its_family():
    config = resolve("quickstart").config
    result, data = find_family(config)
    assert result.model_type == "llama"
    assert (data["hidden_size"], data["tie_word_embeddings"], data["num_key_value_heads"]) == (128, False, 4)
    assert find_family(resolve("qwen3-30b-a3b").config)[0].model_type == "qwen3_moe"
    with pytest.raises(RequestError, match=r"no family describes .*this model"):
        find_family(resolve("quickstart", with_=["alibi"]).config)
    with pytest.raises(RequestError, match="lacks parts"):
        find_family(patch(config, {"model.decoder.layer.attention.position": None}))
    for path, value in (
        ("layer.feed_forward.activation", Swish()),
        ("layer.feed_forward.form", ClampedForm()),
    ):
        with pytest.raises(RequestError, match=path):
            find_family(patch(config, {f"model.decoder.{path}": value}))
    for path, value, kind in (
        ("layer.attention.position.fraction", 0.5, "phi3"),
        ("layer.residual_multiplier", 0.5, "granite"),
        ("output_multiplier", 0.5, "granite"),
    ):
        assert find_family(patch(config, {f"model.decoder.{path}": value}))[0].model_type == kind
    with pytest.raises(RequestError, match=r"softcap: None, here 3.0"):
        find_family(
            patch(config, {"model.decoder.layer.attention.softcap": 3.0, "model.decoder.layer.attention.window": 9})
        )


YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0, "original_max_position_embeddings": 32}


@pytest.mark.fast_cases("deepseek-v2-changes0", "deepseek-v2-changes2", "deepseek-v2-changes6", "deepseek-v2-changes7")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_parameters": YARN},
        {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}},
        {"rope_parameters": {**YARN, "mscale_all_dim": 0.3}},
        {"rope_parameters": {**YARN, "attention_factor": 1.2, "mscale_all_dim": 1.0}},
        {"first_k_dense_replace": 0, "n_shared_experts": None, "q_lora_rank": 12, "norm_topk_prob": False},
        {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "rope_interleave": False, "tie_word_embeddings": True},
    ],
)
@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_a_deepseek_that_was_tuned_finds_its_config(name, changes):
    data = {**json.loads((HF_FIXTURES / name / "config.json").read_text()), **changes}
    config = family(data["model_type"]).resolve(data)[0].config
    described, written = find_family(config)
    assert described.model_type == data["model_type"]
    assert described.differences(written, config) == []
    rope = data["rope_parameters"] if "rope_parameters" in changes else {}
    for key in ("mscale", "mscale_all_dim"):  # vLLM reads these, but not attention_factor
        if key in rope and "attention_factor" not in rope:
            assert written["rope_parameters"][key] == rope[key]


def test_a_parameter_without_counterpart_is_named():
    with pytest.raises(RequestError, match=r"lora_a.*no counterpart[\s\S]*lora merge"):
        open_model(HF_FIXTURES / "llama3", with_=["lora"])


@pytest.mark.parametrize("model_type", ["llama"])
def test_older_files_say_the_same(model_type):
    """Test the format of transformers 4, and files without common keys."""
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}, "max_position_embeddings": 64}
    assert read_rope(Settings(old)) == {
        "type": "rope", "theta": 5e5, "scaling": {"type": "linear-rope-scaling", "factor": 2.0}
    }  # fmt: skip
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 8,
    }
    result, unread = family(model_type).resolve({**sizes, "torch_dtype": "float32", "new_key": 1})
    assert result.config.model.decoder.layer.attention.num_kv_heads is None
    assert result.config.model.decoder.head is not None
    assert unread == ["new_key"]


@pytest.mark.parametrize("pattern", ["a b -> a c", "(a b -> a", "a* b* -> a b", "a -> b a c"])
def test_a_pattern_that_loses_an_axis_is_refused(pattern):
    with pytest.raises(ValueError, match="both sides"):
        Axes.parse(pattern)


@pytest.mark.slow
def test_kimi_linear_reads_both_names_of_its_dense_layers(tmp_path):
    """Published files call them `mlp`, and files that transformers wrote `block_sparse_moe`."""
    folder = shutil.copytree(HF_FIXTURES / "kimi-linear", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("layers.0.mlp", "layers.0.block_sparse_moe"): x for name, x in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, folder / "model.safetensors")
    assert bits(open_model(folder)) == bits(open_model(HF_FIXTURES / "kimi-linear"))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("granite-hybrid", "time_step_limit", [0.1, 5.0]),
        ("granite-hybrid", "layer_types", ["mamba", "convolution", "mamba"]),
        ("granite-hybrid", "layer_types", ["mamba"]),
        ("bamba", "mamba_proj_bias", True),
        ("kimi-linear", "mlp_layer_types", ["sparse", "dense", "sparse"]),
        ("kimi-linear", "mla_use_nope", False),
        ("lfm2", "layer_types", ["conv", "full_attention"]),
        ("lfm2", "use_pos_enc", False),
        ("olmo-hybrid", "layer_types", ["linear_attention", "full_attention"]),
        ("nemotron-h", "moe_latent_size", 16),
        ("nemotron-h", "layers_block_type", ["mamba", "mlp", "attention", "convolution", "mamba"]),
        ("nemotron-h", "num_hidden_layers", 6),
        ("nemotron-h", "mlp_hidden_act", "silu"),
        ("nemotron-h", "time_step_limit", [0.1, 5.0]),
        ("qwen3.5", "layer_types", ["full_attention", "linear_attention", "linear_attention"]),
    ],
)
def test_hybrid_models_refuse_what_they_cannot_compute(name, key, value):
    data = json.loads((HF_FIXTURES / name / "config.json").read_text())
    with pytest.raises(RequestError, match=f"config.json: {key}"):
        family(data["model_type"]).resolve({**data, key: value})


def test_a_model_with_one_kind_of_layers_is_not_a_hybrid():
    data = json.loads((HF_FIXTURES / "bamba/config.json").read_text())
    config = family("bamba").resolve({**data, "attn_layer_indices": []})[0].config
    with pytest.raises(RequestError, match="the model has only one"):
        family("bamba").config_json(config)


@pytest.mark.parametrize(("base_width", "lost"), [(4096, []), (1024, ["scale", "output_multiplier"])])
def test_factors_that_depend_on_the_width_are_exported_as_numbers(base_width, lost):
    """At the base width, they are those of Llama. At others, its format has no key for them."""
    config = resolve("llama2-7b", with_=[f"mup:base_width={base_width}"]).config
    llama = family("llama")
    changes = llama.differences(llama.config_json(config), config)
    assert [change.path.rpartition(".")[2] for change in changes] == lost


def test_nemotron_h_reads_the_letters_of_its_layers():
    data = json.loads((HF_FIXTURES / "nemotron-h/config.json").read_text())
    expected = family("nemotron_h").resolve(data)[0].config.model
    del data["layers_block_type"]
    one = family("nemotron_h")
    assert one.resolve({**data, "hybrid_override_pattern": "M-*EM"})[0].config.model == expected
    assert (
        one.config_json(one.resolve({**data, "layer_types": ["mlp", "mamba"]})[0].config)["hybrid_override_pattern"]
        == "-M"
    )
    with pytest.raises(RequestError, match="hybrid_override_pattern"):
        one.resolve(data)
    with pytest.raises(RequestError, match="expected: M, "):
        one.resolve({**data, "hybrid_override_pattern": "M-X"})


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 8192),
        ({"block_multiple_of": 5000}, 10_000),
        ({"block_ffn_dim_multiplier": None}, 8192),
        ({"block_auto_adjust_ff_dim": False}, 12_288),
        ({"block_ff_dim": 6656}, 4608),
    ],
)
def test_lfm2_derives_the_size_of_its_feed_forward_layers(changes, size):
    data = json.loads((HF_FIXTURES / "lfm2/config.json").read_text())
    data |= {"intermediate_size": 12_288, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, **changes}
    one = family("lfm2")
    config = one.resolve(data)[0].config
    assert config.model.decoder.layer.feed_forward.hidden_dim == size
    assert not one.differences(one.config_json(config), config)


def test_lfm2_reads_where_attention_is():
    data = json.loads((HF_FIXTURES / "lfm2/config.json").read_text()) | {"full_attn_idxs": [0, 2]}
    del data["layer_types"]
    one = family("lfm2")
    assert one.config_json(one.resolve(data)[0].config)["layer_types"] == ["full_attention", "conv", "full_attention"]


def test_olmo_hybrid_derives_sizes_and_reads_positions():
    data = json.loads((HF_FIXTURES / "olmo-hybrid/config.json").read_text())
    sizes = {key: None for key in data if key.startswith("linear_") and ("num" in key or key.endswith("head_dim"))}
    one = family("olmo_hybrid")
    config = one.resolve({**data, **sizes, "layer_types": None, "linear_allow_neg_eigval": False})[0].config
    keys = one.config_json(config)
    assert [keys[key] for key in ("linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim")] == [4, 6, 12]
    assert keys["layer_types"] == ["linear_attention", "linear_attention", "full_attention"]
    assert (keys["linear_allow_neg_eigval"], keys["rope_parameters"]) == (False, {"rope_theta": None})
    rope = {"rope_type": "default", "rope_theta": 1e5}
    assert one.config_json(one.resolve({**data, "rope_parameters": rope})[0].config)["rope_parameters"] == rope
