"""Import and export of model directories, and errors for invalid ones."""

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from axlearn_core.checkpoint import manifest
from axlearn_core.errors import RequestError, WorkError
from axlearn_core.train.inference import load
from axlearn_plugins_models.huggingface.files import stored_tensors, write
from axlearn_plugins_models.huggingface.import_export import export_run, import_run
from axlearn_plugins_models.huggingface.source import open_model
from axlearn_plugins_transformer.text.processor import text_processor
from support.model_directories import model_copy

UNROLLED = "model.decoder.stack.mode=unrolled"


def contents(directory):
    """Return name -> (dtype, shape, bytes)."""
    actual = stored_tensors(directory)
    return {n: (t.dtype, t.shape, t.rows(0, t.shape[0]).tobytes()) for n, t in actual.items()}


def edit(directory, **changes):
    file = directory / "config.json"
    data = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in data.items() if v != "GONE"}))


def rewrite(directory, change):
    """Rewrite the weights of a directory into one file, after applying `change` to {name: array}."""
    stored = stored_tensors(directory)
    values = {n: t.rows(0, t.shape[0]) for n, t in stored.items()}
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    values = change(values)
    write(directory, [[(n, "BF16", v.shape) for n, v in values.items()]], iter(values.values()))


def test_a_round_trip_changes_no_bit(tmp_path, monkeypatch):
    source = model_copy("llama3", tmp_path)
    import_run(source, tmp_path / "run", set=[UNROLLED])
    export_run(tmp_path / "run", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(source)
    described = json.loads((source / "config.json").read_text())
    scaling = {k: v for k, v in described["rope_parameters"].items() if k != "rope_theta"}
    for_4 = {"rope_theta": 10_000.0, "rope_scaling": scaling}  # for transformers 4
    assert json.loads((tmp_path / "out/config.json").read_text()) == described | for_4
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert manifest.steps(tmp_path / "run/checkpoints") == [0]
    run, direct = load(tmp_path / "run"), load(source)
    prompt = "w1 w2 w3"
    assert run.tokenizer.encode_prompt(prompt)[0] == 1
    assert run.generate(prompt, max_tokens=3) == direct.generate(prompt, max_tokens=3)
    with pytest.raises(RequestError, match="already exists"):
        import_run(source, tmp_path / "run")
    with pytest.raises(RequestError, match="already exists"):
        export_run(tmp_path / "run", tmp_path / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(RequestError, match=r"not enough disk[\s\S]*got: 1,000 bytes free[\s\S]*expected: 37,184 bytes"):
        export_run(tmp_path / "run", tmp_path / "new/out")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_templates_by_name_come_along(tmp_path):
    directory = model_copy("qwen3", tmp_path)
    (directory / "chat_template.jinja").write_text("plain")
    for name in ("tool_use", "rag"):
        (directory / f"additional_chat_templates/{name}.jinja").parent.mkdir(exist_ok=True)
        (directory / f"additional_chat_templates/{name}.jinja").write_text(name)
    import_run(directory, tmp_path / "run")
    text = text_processor(load(tmp_path / "run").config)
    assert text.template.render([], tools=[{}]).text == "tool_use"
    export_run(tmp_path / "run", tmp_path / "again")
    for name in (
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "additional_chat_templates/rag.jinja",
    ):
        assert (tmp_path / "again" / name).read_text() == (directory / name).read_text()


@pytest.mark.slow
def test_a_run_that_was_made_of_an_import_is_described_as_the_import(tmp_path):
    """`lora merge` and training keep what lies beside the tokenizer, and nothing else of a model directory."""
    directory = model_copy("deepseek-v2", tmp_path)
    data = json.loads((directory / "config.json").read_text()) | {"eos_token_id": 2, "attention_dropout": 0.25}
    (directory / "config.json").write_text(json.dumps(data))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "max_length": 99}))
    import_run(directory, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/huggingface")
    export_run(tmp_path / "run", tmp_path / "again")
    again = json.loads((tmp_path / "again/config.json").read_text())
    assert {k: again[k] for k in data} == data | {"dtype": "float32"}
    assert json.loads((tmp_path / "again/generation_config.json").read_text())["max_length"] == 99


def test_shards_are_written_with_an_index(tmp_path):
    values = {f"t{i}": np.full((4, 8), i, np.float32) for i in range(5)}
    outputs = [(n, "F32", v.shape) for n, v in values.items()]
    write(tmp_path, [outputs[:2], outputs[2:]], iter(values.values()))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"
    ]  # fmt: skip
    assert {n: t.rows(1, 3).tolist() for n, t in stored_tensors(tmp_path).items()} == {
        n: v[1:3].tolist() for n, v in values.items()
    }


def truncated(d):
    file = d / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def overlapping(d):
    file = d / "model-00001-of-00002.safetensors"
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    names = [n for n in header if n.endswith(("mlp.up_proj.weight", "mlp.gate_proj.weight"))]
    header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(end - 8)
    file.write_bytes(data[:8] + text + data[end:])


def out_of_the_index(d):
    file = d / "model.safetensors.index.json"
    data = json.loads(file.read_text())
    data["weight_map"].pop("model.norm.weight")
    file.write_text(json.dumps(data))


def pickled(d):
    for file in d.glob("*.safetensors*"):
        file.unlink()
    (d / "pytorch_model.bin").write_bytes(b"\x80\x02.")


def larger_tokenizer(d):
    file = d / "tokenizer.json"
    data = json.loads(file.read_text())
    data["model"]["vocab"] |= {f"more{i}": 96 + i for i in range(3)}
    file.write_text(json.dumps(data))


def renamed(values):
    values["model.layers.1.mlp.up.weight"] = values.pop("model.layers.1.mlp.up_proj.weight")
    return values


def new_family(d):
    edit(d, model_type="olmo_9", clip_qkv=3.0, architectures=["Olmo9ForCausalLM"])
    rewrite(d, lambda values: {n.replace("input_layernorm", "post_norm"): v for n, v in values.items()})


WRONG = {
    "no-config": (lambda d: (d / "config.json").unlink(), ["has no config.json"]),
    "torn-config": (lambda d: (d / "config.json").write_text("{"), ["config.json cannot be read"]),
    "family": (lambda d: edit(d, model_type="lama"), [
        "unknown Hugging Face model_type 'lama'", "did you mean: llama",
        "have every key and tensor of this model", "if it is a llama model, set model_type to llama"
    ]),
    "new-family": (new_family, [
        "unknown Hugging Face model_type 'olmo_9'", "nearest: llama, which does not support", "config.json: clip_qkv (3.0)",
        "(begin with `axlearn plugins new --family olmo_9 --like llama`)",
        "tensor model.layers.*.post_norm.weight", "a model without tensor model.layers.*.input_layernorm.weight",
    ]),
    "architecture": (
        lambda d: edit(d, architectures=["LlamaForSequenceClassification"]),
        ["got: LlamaForSequenceClassification", "expected: LlamaForCausalLM"],
    ),
    "rope": (
        lambda d: edit(d, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
        ["rope_type", "got: longrope", "linear"],
    ),
    "activation": (lambda d: edit(d, hidden_act="mish"), ["hidden_act", "got: mish", "'silu'"]),
    "bias": (lambda d: edit(d, mlp_bias=True), ["missing: model.layers.1.mlp.up_proj.bias [48]"]),
    "quantized": (lambda d: edit(d, quantization_config={"quant_method": "gptq"}), [
        "config.json: quantization_config.quant_method", "got: gptq", "expected: compressed-tensors, fp8, mxfp4"
    ]),
    "uncovered": (lambda d: rewrite(d, lambda v: v | {"model.layers.1.mlp.up_proj.bias": v["model.norm.weight"]}), [
        "unused: model.layers.1.mlp.up_proj.bias [32] (nearest: model.layers.*.mlp.up_proj.weight)",
        "or cover unused tensors with a rule or `ignored` of the family",
    ]),
    "split": (lambda d: rewrite(d, lambda v: {n: x[:, :-1] if "q_proj" in n else x for n, x in v.items()}), [
        "shape: model.layers.0.self_attn.q_proj.weight: got [32, 31], expected [32, 32], from "
        "decoder.layer.attention.query.weight as '(n h) d -> d n h'"
    ]),
    "lacking": (lambda d: edit(d, hidden_size="GONE"), ["config.json: does not have hidden_size"]),
    "width": (lambda d: edit(d, intermediate_size=64), ["shape: model.layers.0.mlp.gate_proj.weight: got [48, 32], "]),
    "missing": (lambda d: rewrite(d, renamed), [
        "missing: model.layers.1.mlp.up_proj.weight [48, 32] (nearest: model.layers.1.mlp.up.weight)",
        "unused: model.layers.1.mlp.up.weight",
    ]),
    "untied": (lambda d: rewrite(d, lambda v: v | {"lm_head.weight": v["model.embed_tokens.weight"] * 2}), [
        "lm_head.weight differs from model.embed_tokens.weight"
    ]),
    "truncated": (truncated, ["model-00001-of-00002.safetensors is truncated", "download it again"]),
    "header": (lambda d: (d / "model-00001-of-00002.safetensors").write_bytes(b"x" * 99), ["is not a safetensors file"]),
    "overlap": (overlapping, ["model-00001-of-00002.safetensors: there is a gap or an overlap before"]),
    "shard": (lambda d: (d / "model-00002-of-00002.safetensors").unlink(), ["names missing shards"]),
    "index": (out_of_the_index, ["model.norm.weight: is in model-", "not in the index"]),
    "no-index": (lambda d: (d / "model.safetensors.index.json").unlink(), ["has neither model.safetensors nor"]),
    "pickle": (pickled, ["pytorch_model.bin, in pickle format, which can run arbitrary code", "save_pretrained"]),
    "tokenizer": (larger_tokenizer, ["has more tokens than the model", "got: 96", "expected: at least 99"]),
    "no-tokenizer": (lambda d: (d / "tokenizer.json").unlink(), ["has no tokenizer.json"]),
}  # fmt: skip


@pytest.mark.slow_cases("family", "new-family")
@pytest.mark.parametrize("name", WRONG)
def test_errors_are_reported_and_nothing_is_written(name, tmp_path):
    directory = model_copy("llama3", tmp_path)
    damage, expected = WRONG[name]
    damage(directory)
    with pytest.raises(RequestError) as caught:
        import_run(directory, tmp_path / "run")
    assert all(text in str(caught.value) for text in expected), caught.value
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_an_import_keeps_its_checkpoint_to_itself(tmp_path):
    with pytest.raises(RequestError, match=r"checkpointer.uri[\s\S]*start-from-run"):
        import_run(model_copy("llama3", tmp_path), tmp_path / "run", set=[f"checkpointer.uri={tmp_path}/elsewhere"])
    assert not (tmp_path / "run").exists()


@pytest.mark.fast_cases("import")
@pytest.mark.parametrize("kind", ["import", "export"])
def test_of_what_was_cut_off_nothing_is_left(kind, tmp_path, monkeypatch):
    source = model_copy("llama3", tmp_path)
    if kind == "export":
        import_run(source, tmp_path / "run", set=[UNROLLED])

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    monkeypatch.setattr(Path, "write_bytes", full)
    files = sorted(tmp_path.rglob("*"))
    with pytest.raises(WorkError, match=r"cannot write .*new: No space left on device"):
        import_run(source, tmp_path / "new") if kind == "import" else export_run(tmp_path / "run", tmp_path / "new")
    assert sorted(tmp_path.rglob("*")) == files


def test_a_tied_layer_may_be_there_twice(tmp_path):
    directory = model_copy("llama3", tmp_path)
    rewrite(directory, lambda v: v | {"lm_head.weight": v["model.embed_tokens.weight"]})
    assert "lm_head.weight" not in open_model(directory).stored
