"""Ignored tensors may have any dtype; tensors of the model must be readable."""

import json
from pathlib import Path

import pytest

from axlearn_core.errors import CheckpointError
from axlearn_plugins_models.huggingface.source import open_model
from support.model_directories import model_copy
from support.paths import HF_FIXTURES

IGNORED = {
    "gpt2": ("transformer.h.0.attn.bias", "h.1.attn.masked_bias"),
    "llama3": ("model.layers.0.self_attn.rotary_emb.inv_freq",),
    "mistral": ("model.layers.1.self_attn.rotary_emb.inv_freq",),
    "deepseek-v3": ("model.layers.0.self_attn.rotary_emb.inv_freq",),
}
WIDTHS = {"U8": 1, "BOOL": 1, "I64": 8, "F8_E4M3": 1, "C64": 8, "F32": 4}


def single_file(directory: Path) -> Path:
    """Return the only weights file, or one shard, with the index updated."""
    return sorted(directory.glob("*.safetensors"))[0]


def add(directory: Path, name: str, dtype: str, shape: list[int], width: int) -> None:
    """Add a tensor of zeros to the weights."""
    file = single_file(directory)
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    size, begin = width, len(data) - end
    for n in shape:
        size *= n
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:] + bytes(size))
    index = directory / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"][name] = file.name
        index.write_text(json.dumps(content))


@pytest.mark.fast_cases(
    "BOOL-llama3-model.layers.0.self_attn.rotary_emb.inv_freq",
    "BOOL-mistral-model.layers.1.self_attn.rotary_emb.inv_freq",
    "F8_E4M3-mistral-model.layers.1.self_attn.rotary_emb.inv_freq",
    "U8-llama3-model.layers.0.self_attn.rotary_emb.inv_freq",
    "U8-mistral-model.layers.1.self_attn.rotary_emb.inv_freq",
)
@pytest.mark.parametrize(("model", "name"), [(m, n) for m, names in IGNORED.items() for n in names])
@pytest.mark.parametrize("dtype", ["U8", "BOOL", "F8_E4M3"])
def test_what_a_family_ignores_may_have_any_dtype(model, name, dtype, tmp_path):
    directory = model_copy(model, tmp_path)
    add(directory, name, dtype, [1, 1, 4, 4], WIDTHS[dtype])
    source = open_model(directory)
    assert name not in source.stored
    assert any(name in note for note in source.notes), source.notes


def test_nothing_of_it_is_looked_at(tmp_path):
    directory = model_copy("gpt2", tmp_path)
    add(directory, "transformer.h.0.attn.bias", "NEW", [7, 0, 3], 1)  # a dtype of the future, and no bytes
    add(directory, "transformer.h.1.attn.bias", "F32", [2, 2], 1)  # bytes that do not fit the shape
    assert len(open_model(directory).stored) == len(open_model(HF_FIXTURES / "gpt2").stored)


@pytest.mark.parametrize("dtype", ["U8", "I64", "F8_E4M3"])
def test_a_weight_of_another_dtype_is_refused(dtype, tmp_path):
    directory = model_copy("llama3", tmp_path)
    add(directory, "model.layers.0.mlp.up_proj.weight_scale", dtype, [4], WIDTHS[dtype])
    with pytest.raises(CheckpointError, match=rf"weight_scale has the dtype {dtype}\n.*\n.*quantized weights"):
        open_model(directory)


def test_a_part_of_the_model_whose_bytes_do_not_fit_is_refused(tmp_path):
    directory = model_copy("llama3", tmp_path)
    add(directory, "lm_head.weight", "F32", [3], 2)
    with pytest.raises(CheckpointError, match=r"lm_head.weight \[3\] has 6 bytes"):
        open_model(directory)
