"""The tensors of multi-token prediction: an import reads them, an export writes them, and the heads compute what they should.

`transformers` has no multi-token prediction. The expected logits come from its layers, with the tensors of the head in their place.
"""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import axlearn_core as ax
from axlearn_core.errors import RequestError
from axlearn_plugins_models.huggingface.depth_tensors import NEXT_LAYERS, ONE_DEPTH
from axlearn_plugins_models.huggingface.family import family
from axlearn_plugins_models.huggingface.files import stored_tensors
from axlearn_plugins_models.huggingface.import_export import export_run, import_run
from axlearn_plugins_models.huggingface.source import open_model
from axlearn_plugins_models.huggingface.table import Rule
from support.model_directories import edit_config, model_copy
from support.needs import needs
from support.tensor_files import write_tensors

FEATURE = ["multi-token-prediction"]
FORMATS = {"deepseek-v3": NEXT_LAYERS, "glm4-moe": NEXT_LAYERS, "qwen3-next": ONE_DEPTH}
COUNT = 2
"""Number of layers that a model keeps. The layers after them have other kinds in some fixtures."""
LAST = f"model.layers.{COUNT - 1}."


def arrays_of(directory):
    return {name: tensor.rows(0, tensor.shape[0]) for name, tensor in stored_tensors(directory).items()}


def make_model(name, folder, *, copies=True):
    """Copy a fixture with fewer layers, and add a head whose layer is like the last one. Return it and the head's tensors."""
    directory, form = model_copy(name, folder), FORMATS[name]
    arrays = {n: x for n, x in arrays_of(directory).items() if not n.startswith(f"model.layers.{COUNT}.")}
    # Published files store the bias of the router in float32.
    arrays = {n: x.astype(np.float32) if n.endswith("e_score_correction_bias") else x for n, x in arrays.items()}
    rng = np.random.default_rng(0)

    def near(x):
        return (x.astype(np.float32) + 0.3 * rng.normal(size=x.shape).astype(np.float32)).astype(x.dtype)

    head = {n.replace(LAST, form.layer.format(n=COUNT, k=0)): near(x) for n, x in arrays.items() if n.startswith(LAST)}
    norm = arrays["model.norm.weight"]
    for path, tensor in form.names.items():
        value = np.concatenate([np.eye(len(norm))] * 2, axis=1).astype(norm.dtype) if "projection" in path else norm
        head[tensor.format(n=COUNT, k=0)] = near(value)
    if copies:
        head |= {n.format(n=COUNT, k=0): arrays[original] for n, original in form.copies.items()}
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    write_tensors(directory / "model.safetensors", {**arrays, **head})
    kinds = {"layer_types": ["linear_attention", "full_attention"]} if name == "qwen3-next" else {}
    edit_config(directory, num_hidden_layers=COUNT, **kinds)
    return directory, head


def same_bits(a, b):
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and a[n].tobytes() == b[n].tobytes() for n in a)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "copies"), [*((name, True) for name in FORMATS), ("deepseek-v3", False), ("glm4-moe", False)]
)
def test_an_export_writes_every_tensor_of_an_import_bit_for_bit(name, copies, tmp_path):
    directory, head = make_model(name, tmp_path, copies=copies)
    source = import_run(directory, tmp_path / "run", with_=FEATURE)
    assert not any("ignored" in note for note in source.notes)
    export_run(tmp_path / "run", tmp_path / "out")
    written = arrays_of(tmp_path / "out")
    assert head.keys() < written.keys()
    assert same_bits(written, arrays_of(directory))
    assert family(source.family.model_type).depths is FORMATS[name]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in FORMATS])
def test_without_the_feature_the_tensors_stay_ignored(name, tmp_path):
    directory, head = make_model(name, tmp_path)
    source = open_model(directory)
    assert not head.keys() & source.tensors.keys()
    assert any(note.startswith("ignored, since they are not part of the model: ") for note in source.notes)
    assert not any(path.startswith("mtp.") for path in source.model.abstract)


def expected_logits(directory, head, tokens):
    """The logits of the model and of its head, computed by the layers of transformers."""
    import torch
    import transformers

    class Identity(torch.nn.Module):
        """Stands in for the first layer, which the head does not have."""

        layer_type = "linear_attention"

        def forward(self, hidden_states, *args, **options):
            return hidden_states

    def load(folder):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    form = FORMATS[directory.name]
    names = {name: torch.tensor(head[t.format(n=COUNT, k=0)].astype(np.float32)) for name, t in form.names.items()}
    other = shutil.copytree(directory, directory.parent / "head" / directory.name)
    moved = {n.replace(form.layer.format(n=COUNT, k=0), LAST): x for n, x in head.items()}
    arrays = {n: moved.get(n, x) for n, x in arrays_of(directory).items()}
    arrays["model.norm.weight"] = head[form.names["norm.weight"].format(n=COUNT, k=0)]
    write_tensors(other / "model.safetensors", arrays)
    offset = 1.0 if directory.name == "qwen3-next" else 0.0
    eps = json.loads((directory / "config.json").read_text())["rms_norm_eps"]

    def norm(x, weight):
        return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * (weight + offset)

    with torch.no_grad():
        model, layer = load(directory), load(other)
        ids = torch.tensor(tokens)
        hidden = model.model(ids, use_cache=False).last_hidden_state
        later = model.model.embed_tokens(ids[:, 1:])
        parts = [norm(later, names["embedding_norm.weight"]), norm(hidden[:, :-1], names["hidden_norm.weight"])]
        layer.model.layers[0] = Identity()
        combined = torch.cat(parts, -1) @ names["projection.weight"].T
        logits = layer(inputs_embeds=combined, use_cache=False).logits
        return model.lm_head(hidden).numpy(), logits.numpy()


@pytest.mark.slow
@needs("torch", "transformers")
@pytest.mark.parametrize("name", FORMATS)
def test_the_head_computes_what_the_layers_of_transformers_compute(name, tmp_path):
    directory, head = make_model(name, tmp_path)
    tokens = np.random.default_rng(1).integers(0, 96, (2, 12))
    import_run(directory, tmp_path / "run", with_=FEATURE, set=["model.dtype=float32"])
    model = ax.load(tmp_path / "run").model
    batch = {"tokens": jnp.asarray(tokens, jnp.int32), "targets": jnp.zeros(tokens.shape, jnp.int32)}
    hidden, _ = model.hidden_states(batch)
    ((x, _, _),) = model.predictions(hidden, batch)
    main, later = expected_logits(directory, head, tokens)
    np.testing.assert_allclose(model.logits(hidden), main, atol=2e-4)
    np.testing.assert_allclose(model.logits(x)[:, :-1], later, atol=5e-4)
    assert np.abs(later - main[:, :-1]).max() > 0.1


@pytest.mark.slow
def test_a_trained_run_is_exported_with_the_heads_and_their_number(tmp_path):
    """A run that was not imported writes the copies, which the published files have."""
    directory, _ = make_model("glm4-moe", tmp_path)
    trained = open_model(directory, with_=["multi-token-prediction:depth=1"]).config
    one = family("glm4_moe")
    data = one.config_json(trained)
    assert data["num_nextn_predict_layers"] == 1
    assert not one.differences(data, trained)
    with pytest.raises(RequestError, match=r"model\.layers\.3\.enorm\.weight"):
        open_model(directory, with_=["multi-token-prediction:depth=2"])


@pytest.mark.slow
def test_copies_that_differ_are_refused(tmp_path):
    directory, head = make_model("deepseek-v3", tmp_path)
    name = f"model.layers.{COUNT}.embed_tokens.weight"
    arrays = arrays_of(directory)
    write_tensors(directory / "model.safetensors", {**arrays, name: arrays[name] * 2})
    with pytest.raises(RequestError, match=r"tied tensors differ[\s\S]*fix: import the model without multi-token"):
        open_model(directory, with_=FEATURE)
    assert name in head
    assert name not in open_model(directory).tensors


@pytest.mark.slow
def test_other_families_name_the_parameter_that_their_files_lack(tmp_path):
    with pytest.raises(RequestError, match=r"mtp\.0\..*no counterpart for this tensor"):
        open_model(model_copy("llama3", tmp_path), with_=FEATURE)


def test_rules_and_names_of_depths():
    rules = (
        Rule("decoder.norm.weight", "model.norm.weight"),
        Rule(("decoder.layer.a.weight", "decoder.layer.b.weight"), "model.layers.{layer}.ab.{e}.weight", "o* -> o"),
    )
    paths = {rule.theirs: rule.paths for rule in NEXT_LAYERS.rules(rules, 2, 5)}
    assert paths["model.layers.6.ab.{e}.weight"] == ("mtp.1.layer.a.weight", "mtp.1.layer.b.weight")
    assert paths["model.layers.5.eh_proj.weight"] == ("mtp.0.projection.weight",)
    assert len(paths) == 10
    assert "mtp.layers.0.ab.{e}.weight" in {rule.theirs for rule in ONE_DEPTH.rules(rules, 1, 5)}
    assert NEXT_LAYERS.prefixes(1, 5)[0] == "model.layers.5."
    assert NEXT_LAYERS.find_copies(1, 5)["model.layers.5.shared_head.head.weight"] == "lm_head.weight"
    assert (NEXT_LAYERS.count({"num_nextn_predict_layers": 2}, 1), NEXT_LAYERS.count({}, 3)) == (2, 3)


def test_only_the_layers_of_depths_that_the_model_has_are_read():
    one, data = family("deepseek_v3"), {"num_hidden_layers": 2, "num_nextn_predict_layers": 2}
    names = [f"model.layers.{i}.mlp.up.weight" for i in (1, 2, 3)]
    assert one.ignored_names(data, names) == {*names[1:]}
    assert one.ignored_names(data, names, 1) == {names[2]}
    assert family("qwen3_next").ignored_names(data, ["mtp.fc.weight", "mtp.other"], 1) == {"mtp.other"}
