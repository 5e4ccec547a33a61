"""Read quantized weights as floating-point weights, one slice at a time.

A scheme finds the tensors that describe a quantized weight, such as `weight` and `weight_scale_inv`, and replaces them with one
tensor that has the name and the shape of the weight. Its rows are converted to float32 when they are read, so host memory
holds the quantized and the converted values of one slice. An import then casts them to the dtype of the parameters.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from axlearn_core.errors import CheckpointError, ConfigError, Problem, nearest
from axlearn_plugins_models.huggingface.block_scales import (
    apply_to_blocks,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    grid_shape,
    unpack_integers,
)
from axlearn_plugins_models.huggingface.files import DTYPES, PACKED, StoredTensor, check_readable

KEY = "quantization_config"
Stored = Mapping[str, StoredTensor]
Scheme = Callable[[Mapping[str, Any], Stored], dict[str, StoredTensor]]
"""(`quantization_config`, tensors in the files) -> tensors, with quantized weights replaced by `QuantizedTensor`s.

Raises `RequestError` for a setting or a tensor that the scheme does not support.
"""

ACTIVATION_SCALES = ("activation_scale", "input_scale", "input_zero_point", "output_scale", "output_zero_point")
"""Last parts of the names of tensors that only describe quantized activations."""
EXPONENTS = ("F8_E8M0", "U8")
"""Dtypes of scales that are powers of two."""
SCALE_DTYPES = ("F32", "BF16", "F16", *EXPONENTS)


@attrs.frozen(eq=False, kw_only=True)
class QuantizedTensor(StoredTensor):
    """A quantized weight that is read as float32. An export writes it as bfloat16.

    `shape` is the shape of the weight, `dtype` is `BF16`, and `bytes` is the size of the float32 values.

    Attributes:
        decode: Function that reads and converts `[begin:end]` of the first axis.
    """

    decode: Callable[[int, int], np.ndarray]

    def rows(self, begin: int, end: int) -> np.ndarray:
        """Read `[begin:end]` of the first axis as float32; see `StoredTensor.rows`."""
        with np.errstate(over="ignore", invalid="ignore"):  # reported below
            values = self.decode(begin, end)
        self.check_finite(~np.isfinite(values).reshape(-1), begin)
        return values


def read_scheme(data: Mapping[str, Any], schemes: Mapping[str, Scheme]) -> Scheme | None:
    """Return the scheme that a `config.json` names in `quantization_config`, or None if its weights are not quantized.

    Raises:
        ConfigError: If the scheme is not one of `schemes`.
    """
    settings = data.get(KEY)
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        raise _unsupported("", settings, ["an object"])
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in schemes:
        raise _unsupported("quant_method", method, sorted(schemes))
    return schemes[method]


def dequantize(data: Mapping[str, Any], stored: Stored, schemes: Mapping[str, Scheme]) -> dict[str, StoredTensor]:
    """Replace quantized weights with tensors that are read as floats.

    Args:
        data: Content of `config.json`.
        stored: Name -> tensor in the files.
        schemes: `quant_method` -> scheme.

    Raises:
        RequestError: If the quantization is not supported, or tensors do not fit it.
    """
    scheme = read_scheme(data, schemes)
    if scheme is None:
        return dict(stored)
    try:
        return scheme(data[KEY], stored)
    except (
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
    ) as error:  # schemes compute with the values of an untrusted file
        raise _unsupported("", data[KEY], [f"settings of {data[KEY]['quant_method']}"]) from error


def _unsupported(key: str, value: Any, supported: Sequence[str]) -> ConfigError:
    return ConfigError(
        Problem(
            path=f"config.json: {KEY}" + (f".{key}" if key else ""),
            message="weights that are quantized this way cannot be read",
            got="nothing" if value is None else str(value)[:200],
            expected=", ".join(supported),
            nearest=nearest(str(value), supported),
            fix="use a model with a supported quantization or with bfloat16 weights, or add a scheme to the family's "
            "`quantizations`",
        )
    )


def _damaged(tensor: StoredTensor, message: str, got: str, expected: str, names: Sequence[str] = ()) -> CheckpointError:
    problem = Problem(
        path=f"{tensor.file}: {tensor.name}",
        message=message,
        got=got,
        expected=expected,
        nearest=names,
        fix="use the config.json and the weights from the same model",
    )
    return CheckpointError(str(problem))


def _companion(stored: Stored, tensor: StoredTensor, name: str) -> StoredTensor:
    """Return the tensor that `tensor` needs. Raise `CheckpointError` if it is missing."""
    if name not in stored:
        raise _damaged(
            tensor, "a tensor that belongs to it is missing", "nothing", name, nearest(name, stored, limit=1)
        )
    return stored[name]


def _without(stored: Stored, names: set[str]) -> dict[str, StoredTensor]:
    """Return the tensors without some of them, and without those that describe activations."""
    return {n: t for n, t in stored.items() if n not in names and n.rpartition(".")[2] not in ACTIVATION_SCALES}


def _check_dtype(tensor: StoredTensor, codes: Sequence[str]) -> None:
    check_readable([tensor], {code: {**DTYPES, **PACKED}[code] for code in codes})


def _quantized(
    name: str, shape: Sequence[int], source: StoredTensor, decode: Callable[[int, int], np.ndarray]
) -> StoredTensor:
    return QuantizedTensor(
        file=source.file,
        dtype="BF16",
        shape=tuple(shape),
        start=source.start,
        bytes=4 * math.prod(shape),
        storage=source.storage,
        name=name,
        decode=decode,
    )


@attrs.frozen(eq=False)
class _Grid:
    """Numbers of the blocks of a weight, such as scales.

    Attributes:
        tensor: The numbers.
        shape: Shape with one axis for each axis of the weight.
        block: Size of a block along the last two axes.
    """

    tensor: StoredTensor
    shape: tuple[int, ...]
    block: tuple[int, int]

    @classmethod
    def parse(
        cls,
        tensor: StoredTensor,
        weight: StoredTensor,
        shape: Sequence[int],
        block: Sequence[int],
        dtypes: Sequence[str] = SCALE_DTYPES,
    ) -> "_Grid":
        """Check the numbers for the blocks of a weight with a shape. A `block` of 0 along an axis spans the axis.

        Raises:
            CheckpointError: If there is not one number for each block.
        """
        _check_dtype(tensor, dtypes)
        if len(shape) < 2:
            raise _damaged(weight, "a quantized weight must be a matrix", str(list(shape)), "at least two axes")
        rows, columns = (step or size for step, size in zip(block, shape[-2:], strict=True))
        expected = grid_shape(shape, (rows, columns))
        if (*tensor.shape, *(1,) * (len(shape) - len(tensor.shape))) != expected:
            text = f"{list(expected)}, a number for each block of {rows} x {columns} in {weight.name} {list(shape)}"
            raise _damaged(tensor, "the shape does not fit its weight", str(list(tensor.shape)), text)
        return cls(tensor, expected, (rows, columns))

    def apply(self, operation: Callable[..., Any], values: np.ndarray, begin: int, end: int) -> None:
        """Apply an operation to rows `[begin:end]` of the weight and their numbers, in place."""
        step = self.block[0] if len(self.shape) == 2 else 1
        low, high = begin // step, -(-end // step)
        raw = self.tensor.rows(low, high)
        numbers = decode_e8m0(raw) if self.tensor.dtype in EXPONENTS else raw.astype(np.float32)
        numbers = numbers.reshape(high - low, *self.shape[1:])
        apply_to_blocks(operation, values, numbers, self.block, begin - low * step)


def read_fp8(settings: Mapping[str, Any], stored: Stored) -> dict[str, StoredTensor]:
    """Read `fp8`: numbers in e4m3, and a factor `*_scale_inv` for each block of the last two axes, as in DeepSeek-V3."""
    if (experts := settings.get("expert_dtype") or "fp8") != "fp8":
        raise _unsupported("expert_dtype", experts, ["fp8"])
    block = settings.get("weight_block_size")
    if block is not None and not _are_sizes(block):
        raise _unsupported("weight_block_size", block, ["two positive integers", "null"])
    replaced, used = {}, set[str]()
    for name, scale in stored.items():
        if name.endswith("_scale_inv"):
            weight = _companion(stored, scale, name.removesuffix("_scale_inv"))
            replaced[weight.name] = _scaled(weight, scale, block or (0, 0))
            used.add(name)
    return _without(stored, used) | replaced


def _are_sizes(block: Any) -> bool:
    return isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)


def _scaled(
    weight: StoredTensor,
    scale: StoredTensor,
    block: Sequence[int],
    zero: StoredTensor | None = None,
    code: str = "F8_E4M3",
) -> StoredTensor:
    """Return (weight - zero point) * scale, with a zero point and a scale for each block."""
    _check_dtype(weight, (code,))
    grid = _Grid.parse(scale, weight, weight.shape, block)
    zeros = None if zero is None else _Grid.parse(zero, weight, weight.shape, block, ("I8",))

    def decode(begin: int, end: int) -> np.ndarray:
        raw = weight.rows(begin, end)
        values = decode_e4m3(raw) if code == "F8_E4M3" else raw.astype(np.float32)
        if zeros is not None:
            zeros.apply(np.subtract, values, begin, end)
        grid.apply(np.multiply, values, begin, end)
        return values

    return _quantized(weight.name, weight.shape, weight, decode)


def read_mxfp4(settings: Mapping[str, Any], stored: Stored) -> dict[str, StoredTensor]:
    """Read `mxfp4`: `*_blocks` [E, N, G, 16] of two numbers in e2m1 per byte, and `*_scales` [E, N, G] in e8m0.

    The weight of the experts is [E, 32 G, N], as in gpt-oss.
    """
    replaced, used = {}, set[str]()
    for name, blocks in stored.items():
        if name.endswith("_blocks"):
            weight = name.removesuffix("_blocks")
            scales = _companion(stored, blocks, f"{weight}_scales")
            replaced[weight] = _mxfp4(weight, blocks, scales)
            used |= {name, scales.name}
    return _without(stored, used) | replaced


def _mxfp4(name: str, blocks: StoredTensor, scales: StoredTensor) -> StoredTensor:
    for tensor in (blocks, scales):
        _check_dtype(tensor, ("U8",))
    if len(blocks.shape) != 4 or blocks.shape[-1] != 16:
        raise _damaged(
            blocks, "these are not blocks of experts", str(list(blocks.shape)), "[experts, outputs, groups, 16]"
        )
    if scales.shape != blocks.shape[:-1]:
        raise _damaged(
            scales, "the shape does not fit its blocks", str(list(scales.shape)), str(list(blocks.shape[:-1]))
        )
    experts, outputs, groups, _ = blocks.shape

    def decode(begin: int, end: int) -> np.ndarray:
        values = decode_e2m1(blocks.rows(begin, end))
        values *= decode_e8m0(scales.rows(begin, end))[..., None]
        return values.reshape(end - begin, outputs, -1).transpose(0, 2, 1)

    return _quantized(name, (experts, 32 * groups, outputs), blocks, decode)


FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
STRATEGIES = ("tensor", "channel", "group", "block")
KINDS = {("float", 8): "F8_E4M3", ("int", 8): "I8", ("int", 4): "I8"}
"""(type, bits) of weights in compressed-tensors -> dtype of the weights if they are not packed."""


@attrs.frozen
class _Group:
    """A group of layers in compressed-tensors.

    Attributes:
        targets: Names of layers, regular expressions after `re:`, or classes.
        bits: Bits of a weight.
        code: Dtype of weights that are not packed.
        block: Size of a block with one scale. 0 spans the axis.
    """

    targets: tuple[str, ...]
    bits: int
    code: str
    block: tuple[int, int]

    def names(self, module: str) -> bool:
        """Return whether a target names a layer, and not its class."""
        return any(re.match(t[3:], module) if t.startswith("re:") else t == module for t in self.targets)


def read_compressed_tensors(settings: Mapping[str, Any], stored: Stored) -> dict[str, StoredTensor]:
    """Read `compressed-tensors`: weights in e4m3 or int8, or integers of 4 or 8 bits that are packed in int32."""
    groups = _parse_groups(settings)
    replaced, used = {}, set[str]()
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part not in ("weight_packed", "weight_scale") or (
            part == "weight_scale" and f"{module}.weight_packed" in stored
        ):
            continue
        group = next((g for g in groups if g.names(module)), None) or groups[0]
        if f"{module}.weight_g_idx" in stored:
            raise _unsupported("config_groups.*.weights.actorder", "group", ["weight", "null"])
        zero = stored.get(f"{module}.weight_zero_point")
        if part == "weight_packed":
            scale = _companion(stored, tensor, f"{module}.weight_scale")
            weight = _packed(tensor, scale, _companion(stored, tensor, f"{module}.weight_shape"), zero, group)
        else:
            weight = _scaled(_companion(stored, tensor, f"{module}.weight"), tensor, group.block, zero, group.code)
        replaced[weight.name] = weight
        used |= {f"{module}.{n}" for n in ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")}
    return _without(stored, used) | replaced


def _parse_groups(settings: Mapping[str, Any]) -> list[_Group]:
    """Return the groups of layers with quantized weights. Groups that name classes come last.

    Raises:
        ConfigError: If a setting is not supported.
    """
    sparsity = settings.get("sparsity_config") or {}
    for key, value, supported in (
        ("sparsity_config.format", sparsity.get("format") or "dense", ["dense"]),
        ("transform_config", settings.get("transform_config") or None, [None]),
    ):
        if value not in supported:
            raise _unsupported(key, value, [str(s) for s in supported])
    groups = []
    for name, group in (settings.get("config_groups") or {}).items():
        weights = group.get("weights")
        if not weights:
            continue
        path = f"config_groups.{name}"
        kind, strategy = (weights.get("type", "int"), weights.get("num_bits", 8)), weights.get("strategy")
        for key, value, supported in (
            ("format", group.get("format") or settings.get("format"), FORMATS),
            ("weights.type", f"{kind[0]} with {kind[1]} bits", [f"{t} with {n} bits" for t, n in KINDS]),
            ("weights.strategy", strategy, STRATEGIES),
        ):
            if value not in supported:
                raise _unsupported(f"{path}.{key}", value, supported)
        blocks: dict[str, Any] = {
            "tensor": (0, 0),
            "channel": (1, 0),
            "group": (1, weights.get("group_size")),
            "block": weights.get("block_structure"),
        }
        block = blocks[strategy]
        if strategy in ("group", "block") and not _are_sizes(block):
            raise _unsupported(f"{path}.weights", f"strategy {strategy} with blocks of {block}", ["positive sizes"])
        groups.append(_Group(tuple(group.get("targets") or ()), kind[1], KINDS[kind], (block[0], block[1])))
    if not groups:
        raise _unsupported("config_groups", settings.get("config_groups"), ["at least one group with weights"])
    return sorted(groups, key=lambda g: all(t.isidentifier() for t in g.targets), reverse=True)


def _packed(
    words: StoredTensor, scale: StoredTensor, shape_tensor: StoredTensor, zero: StoredTensor | None, group: _Group
) -> StoredTensor:
    """Return the weight of integers that are packed along the last axis. Zero points are packed along the first one."""
    bits, name = group.bits, words.name.removesuffix("_packed")
    if group.code != "I8":
        raise _unsupported("config_groups.*.weights.type", f"float, for {words.name}", ["int"])
    _check_dtype(words, ("I32",))
    _check_dtype(shape_tensor, ("I64", "I32"))
    if shape_tensor.shape != (2,):
        raise _damaged(shape_tensor, "this is not the shape of a matrix", str(list(shape_tensor.shape)), "[2]")
    shape = tuple(int(n) for n in shape_tensor.rows(0, 2))
    if words.shape != (shape[0], math.ceil(shape[1] * bits / 32)):
        text = f"{shape_tensor.name} {list(shape)} with {bits} bits each"
        raise _damaged(words, "the shape does not fit its weight", str(list(words.shape)), text)
    grid = _Grid.parse(scale, words, shape, group.block)
    numbers = None
    if zero is not None:
        _check_dtype(zero, ("I32",))
        if zero.shape != (math.ceil(shape[0] * bits / 32), grid.shape[1]):
            text = f"{grid.shape[0]} x {grid.shape[1]} numbers with {bits} bits each, packed along the first axis"
            raise _damaged(zero, "the shape does not fit its weight", str(list(zero.shape)), text)
        numbers = zero

    def decode(begin: int, end: int) -> np.ndarray:
        values = unpack_integers(words.rows(begin, end), bits, shape[1])
        if numbers is not None:
            points = unpack_integers(numbers.rows(0, numbers.shape[0]).T, bits, shape[0]).T
            apply_to_blocks(np.subtract, values, points[begin:end], (1, grid.block[1]))
        grid.apply(np.multiply, values, begin, end)
        return values

    return _quantized(name, shape, words, decode)


SCHEMES: Mapping[str, Scheme] = {
    "fp8": read_fp8,
    "mxfp4": read_mxfp4,
    "compressed-tensors": read_compressed_tensors,
}
"""`quant_method` in `config.json` -> scheme."""
