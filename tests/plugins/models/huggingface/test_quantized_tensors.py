"""Quantized weights: how they are read and exported, and errors."""

import json
import math

import jax
import ml_dtypes
import numpy as np
import pytest

from axlearn_core.errors import RequestError
from axlearn_plugins_models.huggingface import stream
from axlearn_plugins_models.huggingface.family import Settings, family
from axlearn_plugins_models.huggingface.files import stored_tensors
from axlearn_plugins_models.huggingface.import_export import export_run, import_run
from axlearn_plugins_models.huggingface.quantized_tensors import SCHEMES, dequantize
from axlearn_plugins_models.huggingface.source import open_model
from support.model_directories import model_copy
from support.needs import needs
from support.tensor_files import store_tensors, write_tensors

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4"}


def read(settings, arrays, directory, name="w.weight"):
    """Return a weight, read in slices of 3 rows, of tensors in a file."""
    tensor = dequantize({"quantization_config": settings}, store_tensors(directory, arrays), SCHEMES)[name]
    assert (tensor.dtype, tensor.name) == ("BF16", name)
    rows = range(0, tensor.shape[0], 3)
    parts = [tensor.rows(i, min(i + 3, tensor.shape[0])) for i in rows]
    assert [p.shape for p in parts] == [(min(3, tensor.shape[0] - i), *tensor.shape[1:]) for i in rows]
    return np.concatenate(parts)


def random_fp8(shape, grid, seed=0):
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=shape).astype(E4M3)
    return weight, rng.uniform(0.5, 2, grid).astype(np.float32)


@pytest.mark.parametrize("shape", [(256, 128), (130, 259), (5, 7), (2, 131, 129)])
def test_fp8_blocks(shape, tmp_path):
    grid = (*shape[:-2], math.ceil(shape[-2] / 128), math.ceil(shape[-1] / 128))
    weight, scale = random_fp8(shape, grid)
    full = np.repeat(np.repeat(scale, 128, axis=-2), 128, axis=-1)[..., : shape[-2], : shape[-1]]
    arrays = {"w.weight": weight, "w.weight_scale_inv": scale, "w.input_scale": np.ones(1, np.float32)}
    assert np.array_equal(read(FP8, arrays, tmp_path), weight.astype(np.float32) * full)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_fp8_with_one_scale(shape, tmp_path):
    weight, _ = random_fp8((5, 7), ())
    scale = np.full(shape, 0.25, BF16)
    got = read({**FP8, "weight_block_size": None}, {"w.weight": weight, "w.weight_scale_inv": scale}, tmp_path)
    assert np.array_equal(got, weight.astype(np.float32) / 4)


def test_fp8_with_powers_of_two(tmp_path):
    weight, _ = random_fp8((130, 3), ())
    codes = np.array([[126], [129]], np.uint8).view(ml_dtypes.float8_e8m0fnu)
    got = read(FP8, {"w.weight": weight, "w.weight_scale_inv": codes}, tmp_path)
    assert np.array_equal(got, weight.astype(np.float32) * np.repeat([[0.5], [4]], [128, 2], axis=0))


def test_mxfp4_is_transposed(tmp_path):
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (4, 6, 2, 16)).astype(np.uint8)
    scales = rng.integers(120, 130, (4, 6, 2)).astype(np.uint8)
    blocks[0, 0, 0, :8] = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    scales[0, 0, 0], scales[0, 1, 0] = 128, 0
    got = read(MXFP4, {"e.gate_up_proj_blocks": blocks, "e.gate_up_proj_scales": scales}, tmp_path, "e.gate_up_proj")
    assert got.shape == (4, 64, 6)
    assert got[0, :8, 0].tolist() == [0, 1, 2, 3, 4, 6, 8, 12]
    assert got[0, 8:16, 0].tolist() == [-0.0, -1, -2, -3, -4, -6, -8, -12]
    assert np.abs(got[0, :32, 1]).max() <= 6 * 2.0**-127


def group_settings(strategy="group", bits=4, kind="int", fmt="pack-quantized", **more):
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def pack(values, bits):
    """Pack integers along the last axis into int32, as `pack_to_int32` does if the bits divide 32."""
    codes = (values + (1 << (bits - 1))).astype(np.uint64)
    each = 32 // bits
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % each))).reshape(len(codes), -1, each)
    return (codes << (np.arange(each, dtype=np.uint64) * bits)).sum(axis=-1).astype(np.uint32).view(np.int32)


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize(("bits", "columns"), [(4, 64), (8, 64), (4, 32)])
def test_packed_integers(bits, columns, zero_points, tmp_path):
    rng = np.random.default_rng(0)
    values = rng.integers(-(1 << (bits - 1)), 1 << (bits - 1), (7, columns))
    zeros = rng.integers(-3, 4, (7, columns // 32)) if zero_points else np.zeros((7, columns // 32), np.int64)
    scale = rng.uniform(0.5, 2, (7, columns // 32)).astype(BF16)
    arrays = {
        "w.weight_packed": pack(values, bits),
        "w.weight_scale": scale,
        "w.weight_shape": np.array([7, columns]),
        **({"w.weight_zero_point": pack(zeros.T, bits).T.copy()} if zero_points else {}),
    }
    got = read(group_settings(bits=bits, group_size=32), arrays, tmp_path)
    expected = (values - np.repeat(zeros, 32, axis=1)) * np.repeat(scale.astype(np.float32), 32, axis=1)
    assert np.array_equal(got, expected.astype(np.float32))


@pytest.mark.parametrize(("strategy", "scale"), [("tensor", (1,)), ("channel", (5, 1)), ("channel", (5,))])
@pytest.mark.parametrize("kind", ["int", "float"])
def test_weights_in_8_bits(kind, strategy, scale, tmp_path):
    rng = np.random.default_rng(0)
    weight = rng.integers(-128, 128, (5, 6)).astype(np.int8) if kind == "int" else rng.normal(size=(5, 6)).astype(E4M3)
    scales = rng.uniform(0.5, 2, scale).astype(np.float32)
    settings = group_settings(strategy, 8, kind, f"{kind}-quantized")
    got = read(settings, {"w.weight": weight, "w.weight_scale": scales}, tmp_path)
    assert np.array_equal(got, weight.astype(np.float32) * scales.reshape(-1, 1))


def test_groups_of_layers_have_their_own_formats(tmp_path):
    """Kimi K2 has experts of 4 bits, and other layers of 8 bits."""
    settings = group_settings("channel", 8, "float", "mixed-precision")
    experts = {
        "targets": ["re:.*experts.*"],
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    }
    settings["config_groups"] = {"a": {**experts, "format": "pack-quantized"}, **settings["config_groups"]}
    values = np.arange(-8, 8).repeat(2).reshape(1, 32)
    weight = np.ones((2, 3), E4M3)
    arrays = {
        "m.experts.0.up.weight_packed": pack(values, 4), "m.experts.0.up.weight_scale": np.full((1, 1), 2, BF16),
        "m.experts.0.up.weight_shape": np.array([1, 32], np.int32),
        "m.q.weight": weight, "m.q.weight_scale": np.array([[2], [3]], BF16), "m.norm.weight": np.ones(3, BF16),
    }  # fmt: skip
    assert np.array_equal(read(settings, arrays, tmp_path, "m.experts.0.up.weight"), 2 * values)
    assert read(settings, arrays, tmp_path, "m.q.weight").tolist() == [[2] * 3, [3] * 3]


GOOD = {"w.weight": np.ones((130, 4), E4M3), "w.weight_scale_inv": np.ones((2, 1), np.float32)}
PACKED = {
    "w.weight_packed": np.zeros((2, 4), np.int32),
    "w.weight_scale": np.ones((2, 1), BF16),
    "w.weight_shape": np.array([2, 32]),
}
BLOCKS = {"e_blocks": np.zeros((1, 2, 3, 16), np.uint8), "e_scales": np.zeros((1, 2, 3), np.uint8)}
KIMI = group_settings(group_size=32)
WRONG = {
    "method": ({"quant_method": "gptq"}, {}, [
        "config.json: quantization_config.quant_method", "got: gptq", "expected: compressed-tensors, fp8, mxfp4", "fix: "
    ]),
    "nearest": ({"quant_method": "mxfp"}, {}, ["did you mean: mxfp4"]),
    "list": ({"quant_method": ["fp8"]}, {}, ["got: ['fp8']"]),
    "no-object": ("fp8", {}, ["quantization_config: weights that are", "expected: an object"]),
    "block": ({**FP8, "weight_block_size": [128]}, GOOD, ["quantization_config.weight_block_size", "got: [128]"]),
    "empty-block": ({**FP8, "weight_block_size": [0, 128]}, GOOD, ["weight_block_size", "got: [0, 128]"]),
    "fp4": ({**FP8, "expert_dtype": "fp4"}, GOOD, ["expert_dtype", "got: fp4"]),
    "grid": (FP8, {**GOOD, "w.weight_scale_inv": np.ones((1, 1), np.float32)}, [
        "w.weight_scale_inv: the shape does not fit its weight", "got: [1, 1]",
        "[2, 1], a number for each block of 128 x 128 in w.weight [130, 4]",
    ]),
    "vector": (FP8, {"w.weight": np.ones(4, E4M3), "w.weight_scale_inv": np.ones(1, np.float32)}, [
        "w.weight: a quantized weight must be a matrix", "got: [4]"
    ]),
    "squeezed": (FP8, {"w.weight": np.ones((4, 1, 3), E4M3), "w.weight_scale_inv": np.ones((4, 3), np.float32)}, [
        "the shape does not fit its weight", "got: [4, 3]", "expected: [4, 1, 1]"
    ]),
    "no-weight": (FP8, {"w.weight_scale_inv": GOOD["w.weight_scale_inv"], "w.weights": GOOD["w.weight"]}, [
        "w.weight_scale_inv: a tensor that belongs to it is missing", "expected: w.weight", "did you mean: w.weights?"
    ]),
    "dtype": (FP8, {**GOOD, "w.weight": np.ones((130, 4), np.int8)}, ["w.weight has the dtype I8", "one of F8_E4M3"]),
    "blocks": (MXFP4, {**BLOCKS, "e_blocks": np.zeros((2, 3, 16), np.uint8)}, [
        "e_blocks: these are not blocks of experts", "got: [2, 3, 16]", "[experts, outputs, groups, 16]"
    ]),
    "scales": (MXFP4, {**BLOCKS, "e_scales": np.zeros((1, 2), np.uint8)}, ["e_scales", "got: [1, 2]", "[1, 2, 3]"]),
    "no-scales": (MXFP4, {"e_blocks": BLOCKS["e_blocks"]}, ["e_blocks: a tensor that", "expected: e_scales"]),
    "format": ({**KIMI, "format": "nvfp4-pack-quantized"}, {}, [
        "config_groups.group_0.format", "got: nvfp4-pack-quantized", "pack-quantized"
    ]),
    "strategy": (group_settings("token"), {}, ["config_groups.group_0.weights.strategy", "got: token", "channel"]),
    "bits": (group_settings(bits=3), {}, ["config_groups.group_0.weights.type", "got: int with 3 bits", "int with 4"]),
    "group-size": (group_settings(), {}, ["group_0.weights", "strategy group with blocks of (1, None)"]),
    "no-groups": ({"quant_method": "compressed-tensors"}, {}, ["quantization_config.config_groups", "got: nothing"]),
    "sparse": ({**KIMI, "sparsity_config": {"format": "sparse-24-bitmask"}}, {}, ["sparsity_config.format"]),
    "transform": ({**KIMI, "transform_config": {"config_groups": {}}}, {}, ["transform_config"]),
    "settings": ({**KIMI, "config_groups": {"a": 3}}, {}, ["quantization_config: weights that", "settings of compressed"]),
    "order": (KIMI, {**PACKED, "w.weight_g_idx": np.zeros(32, np.int32)}, ["weights.actorder", "got: group"]),
    "shape": (KIMI, {**PACKED, "w.weight_shape": np.array([2, 33])}, [
        "w.weight_packed: the shape does not fit its weight", "got: [2, 4]", "w.weight_shape [2, 33] with 4 bits each"
    ]),
    "ranks": (KIMI, {**PACKED, "w.weight_shape": np.array([[2, 32]])}, ["w.weight_shape: this is not", "got: [1, 2]"]),
    "packed-scale": (KIMI, {**PACKED, "w.weight_scale": np.ones((2, 3), BF16)}, ["w.weight_scale", "expected: [2, 1]"]),
    "zero-point": (KIMI, {**PACKED, "w.weight_zero_point": np.zeros((2, 1), np.int32)}, [
        "w.weight_zero_point", "got: [2, 1]", "2 x 1 numbers with 4 bits each"
    ]),
    "packed-float": (group_settings("tensor", 8, "float"), PACKED, ["weights.type", "float, for w.weight_packed"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_unsupported_quantizations_and_wrong_tensors_are_refused(name, tmp_path):
    settings, arrays, expected = WRONG[name]
    with pytest.raises(RequestError) as caught:
        dequantize({"quantization_config": settings}, store_tensors(tmp_path, arrays or GOOD), SCHEMES)
    assert all(text in str(caught.value) for text in expected), caught.value
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("arrays", "settings", "place"),
    [
        ({"w.weight": np.array([[1, 2], [3, np.nan]], E4M3), "w.weight_scale_inv": np.ones((1, 1), np.float32)}, FP8, "[1, 1]"),
        (
            {
                "w.weight_blocks": np.full((1, 1, 1, 16), 0x77, np.uint8),
                "w.weight_scales": np.full((1, 1, 1), 254, np.uint8),
            },
            MXFP4,
            "[0, 0, 0]",
        ),
    ],
    ids=["nan", "overflow"],
)  # fmt: skip
def test_a_value_that_is_not_finite_is_named(arrays, settings, place, tmp_path):
    tensor = dequantize({"quantization_config": settings}, store_tensors(tmp_path, arrays), SCHEMES)["w.weight"]
    with pytest.raises(RequestError) as caught:
        tensor.rows(0, tensor.shape[0])
    assert "w.weight has" in str(caught.value)
    assert f"non-finite values, the first at {place}" in str(caught.value)


def quantize_model(directory, block=16):
    """Convert most matrices of a directory to FP8 with blocks, and add a layer that predicts another token."""
    arrays = {n: t.rows(0, t.shape[0]) for n, t in stored_tensors(directory).items()}
    quantized, values = {}, {}
    for name, array in arrays.items():
        values[name] = array.astype(np.float32)
        if array.ndim < 2 or "embed" in name or "head" in name or name.endswith("gate.weight"):
            quantized[name] = array
            continue
        rows, columns = array.shape
        grid = (
            np.random.default_rng(0).uniform(0.01, 0.02, (-(-rows // block), -(-columns // block))).astype(np.float32)
        )
        full = np.repeat(np.repeat(grid, block, axis=0), block, axis=1)[:rows, :columns]
        quantized[name] = (values[name] / full).clip(-448, 448).astype(E4M3)
        quantized[f"{name}_scale_inv"] = grid
        values[name] = quantized[name].astype(np.float32) * full
    data = json.loads((directory / "config.json").read_text())
    layer = f"model.layers.{data['num_hidden_layers']}.eh_proj.weight"
    quantized |= {layer: np.ones((2, 2), E4M3), f"{layer}_scale_inv": np.ones((1, 1), np.float32)}
    data |= {"quantization_config": {**FP8, "weight_block_size": [block, block]}, "num_nextn_predict_layers": 1}
    data["dtype"] = "bfloat16"
    (directory / "config.json").write_text(json.dumps(data))
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    write_tensors(directory / "model.safetensors", quantized)
    return values, layer


@pytest.mark.parametrize("name", ["llama3", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
def test_a_quantized_model_is_imported_and_exported_in_bfloat16(name, tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "SLICE", 3000)
    directory = model_copy(name, tmp_path)
    values, layer = quantize_model(directory)
    source = import_run(directory, tmp_path / "run", set=["model.decoder.stack.mode=unrolled"])
    assert any("of the quantization fp8 were converted to floating point" in note for note in source.notes)
    assert any(layer in note for note in source.notes)
    part = source.tensors["model.layers.0.self_attn.o_proj.weight"].parts[0]
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    spec = source.model.abstract[part.path]  # [layers, heads, head size, width]
    params = source.read({part.path: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=place)})
    expected = values["model.layers.0.self_attn.o_proj.weight"]
    assert np.array_equal(np.asarray(params[part.path])[0].reshape(-1, expected.shape[0]), expected.T)
    export_run(tmp_path / "run", tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    out = stored_tensors(tmp_path / "out")
    assert out.keys() == values.keys()
    for name, tensor in out.items():
        assert tensor.dtype in ("BF16", "F32")  # biases of the router keep their dtype
        exact = values[name] if tensor.dtype == "F32" else values[name].astype(BF16)
        assert np.array_equal(tensor.rows(0, tensor.shape[0]), exact), name
    again = open_model(tmp_path / "out")
    assert not any("quantization" in note for note in again.notes)


def test_a_family_may_add_a_scheme(tmp_path):
    settings = {"quantization_config": {"quant_method": "halves"}}
    stored = store_tensors(tmp_path, GOOD)

    def halves(settings, stored):
        return {"halved": stored["w.weight"]}

    assert family("llama").quantizations(Settings(settings)) is SCHEMES
    assert dequantize(settings, stored, {**SCHEMES, "halves": halves}) == {"halved": stored["w.weight"]}
    with pytest.raises(RequestError, match="got: halves"):
        family("llama").dequantize(settings, stored)


def test_layers_that_predict_other_tokens_are_ignored():
    one = family("deepseek_v3")
    names = [f"model.layers.{i}.mlp.up.weight" for i in (1, 2, 3, 4, 21)]
    data = {"num_hidden_layers": 2, "num_nextn_predict_layers": 2}
    assert one.ignored_names(data, names) == {names[1], names[2]}
    assert one.ignored_names({"num_hidden_layers": 2}, [*names, "a.rotary_emb.inv_freq"]) == {"a.rotary_emb.inv_freq"}


@pytest.mark.slow
@needs("torch", "transformers")
def test_numbers_are_those_of_transformers(tmp_path):
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    for shape in ((256, 384), (3, 128, 256)):
        weight, scale = random_fp8(shape, (*shape[:-2], shape[-2] // 128, shape[-1] // 128))
        tensors = torch.tensor(weight.view(np.uint8)).view(torch.float8_e4m3fn), torch.tensor(scale)
        expected = Fp8Dequantize(None)._dequantize_one(*tensors, output_dtype=torch.float32).numpy()
        assert np.array_equal(read(FP8, {"w.weight": weight, "w.weight_scale_inv": scale}, tmp_path), expected)
    blocks = rng.integers(0, 256, (4, 64, 3, 16)).astype(np.uint8)
    scales = rng.integers(0, 253, (4, 64, 3)).astype(np.uint8)
    got = read(MXFP4, {"w.weight_blocks": blocks, "w.weight_scales": scales}, tmp_path)
    expected = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32).numpy()
    assert np.array_equal(got, expected)
    in_bfloat16 = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales)).float().numpy()
    assert np.array_equal(got.astype(BF16).astype(np.float32), in_bfloat16)


@pytest.mark.slow
@needs("torch")
def test_edges_are_those_of_torch(tmp_path):
    import torch

    weight, scale = random_fp8(
        (576, 200), (5, 2)
    )  # DeepSeek's kv_a_proj_with_mqa has 576 rows: transformers refuses them
    codes = torch.tensor(weight.view(np.uint8)).view(torch.float8_e4m3fn).float()
    full = torch.tensor(scale).repeat_interleave(128, 0).repeat_interleave(128, 1)[:576, :200]
    got = read(FP8, {"w.weight": weight, "w.weight_scale_inv": scale}, tmp_path)
    assert np.array_equal(got, (codes * full).numpy())
    scales, zeros = torch.rand(6) / 50, torch.randint(-5, 6, (6,))
    integers = torch.randint(-128, 128, (6, 8), dtype=torch.int8)
    names = ("w.weight", "w.weight_scale", "w.weight_zero_point")
    arrays = dict(zip(names, (integers.numpy(), scales.numpy(), zeros.numpy().astype(np.int8)), strict=True))
    got = read(group_settings("channel", 8, "int", "int-quantized"), arrays, tmp_path)
    rounded = torch.fake_quantize_per_channel_affine(torch.tensor(got), scales, zeros.int(), 0, -128, 127)
    assert np.array_equal(got, rounded.numpy())  # every value is one that torch can represent
    assert np.array_equal(got, ((integers.float() - zeros[:, None]) * scales[:, None]).numpy())
