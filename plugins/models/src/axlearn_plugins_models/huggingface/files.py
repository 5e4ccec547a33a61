"""Read and write the safetensors files of a model directory.

The format (huggingface.co/docs/safetensors) is: the length of the header in eight bytes, the header as JSON (name -> dtype, shape,
begin and end of the bytes), then the bytes. This module reads the header itself, so that it can read a tensor in slices into its
own memory. The safetensors library maps the file into memory instead, and the mapped pages would count as used memory until the
system reclaims them.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import ml_dtypes
import numpy as np

from axlearn_core.checkpoint import LocalStorage
from axlearn_core.contracts.storage import Storage
from axlearn_core.errors import CheckpointError, RequestError, StorageError, nearest
from axlearn_plugins_models.huggingface.members import INDEX, SINGLE, member, read_json
from axlearn_plugins_models.huggingface.table import Tensor

DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
"""Supported dtypes of weights."""
PACKED: dict[str, Any] = {
    "U8": np.uint8,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
"""Dtypes of quantized weights and their scales, which `quantized_tensors` converts. Others raise an error that names them."""
CODES = {str(np.dtype(dtype)): code for code, dtype in DTYPES.items()}
SHARD_BYTES = 5_000_000_000
HEADER_BYTES = 100_000_000
"""Maximum length of a safetensors header, as in the safetensors library."""
_EXPONENTS = {"F64": 0x7FF0 << 48, "F32": 0x7F80 << 16, "F16": 0x7C00, "BF16": 0x7F80}
CHECKED = 2**17
"""Number of values that are checked at a time, which fit into the processor's cache."""


@attrs.frozen
class StoredTensor:
    """A tensor in a file.

    Attributes:
        file: Path of the file.
        dtype: Safetensors code of the dtype, such as `BF16`.
        shape: Shape.
        start: Offset of the first byte in the file.
        bytes: Number of bytes.
        storage: Storage from which the file is read by name.
        name: Name in the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    bytes: int
    storage: Storage
    name: str = ""

    def rows(self, begin: int, end: int) -> np.ndarray:
        """Read `[begin:end]` of the first axis, or all of a scalar.

        Raises:
            CheckpointError: If the file is too short, or a value is not finite. Values of `PACKED` dtypes are not checked.
        """
        dtype = np.dtype(DTYPES.get(self.dtype) or PACKED[self.dtype])
        shape = (end - begin, *self.shape[1:]) if self.shape else ()
        array = np.empty(shape, dtype)
        row = self.bytes // self.shape[0] if self.shape and self.shape[0] else 0
        view = array.reshape(-1).view(np.uint8).data if array.size else memoryview(bytearray())
        try:
            self.storage.read_into(self.file.name, self.start + begin * row, view)
        except StorageError as error:
            raise CheckpointError(f"{error}\n    fix: the file changed while it was read; download it again") from error
        if self.dtype in DTYPES:
            bits = array.reshape(-1).view(f"u{dtype.itemsize}")
            exponent = bits.dtype.type(_EXPONENTS[self.dtype])
            parts = (bits[i : i + CHECKED] for i in range(0, bits.size, CHECKED))
            if any(((part & exponent) == exponent).any() for part in parts):
                self.check_finite((bits & exponent) == exponent, begin)
        return array

    def check_finite(self, bad: np.ndarray, begin: int) -> None:
        """Raise `CheckpointError` if a value in the rows from `begin` on is not finite. `bad` marks these values."""
        if bad.any():
            flat_index = begin * max(1, math.prod(self.shape[1:])) + int(bad.argmax())
            raise CheckpointError(
                f"{self.file}: {self.name} has {int(bad.sum())} non-finite values, the first at "
                f"{[int(i) for i in np.unravel_index(flat_index, self.shape)]}\n"
                "    fix: download the model again, or use another one"
            )


def stored_tensors(directory: Path, storage: Storage | None = None) -> dict[str, StoredTensor]:
    """Return all tensors of a model directory by name, from `model.safetensors` or from the shards in the index.

    Args:
        directory: Model directory.
        storage: Storage to read the tensors from; the default is the directory.

    Raises:
        CheckpointError: If there are no weights, a shard is missing or truncated, or the index does not match the shards.
    """
    storage = storage or LocalStorage(directory)
    if (directory / INDEX).is_file():
        return _sharded_tensors(directory, storage)
    shards = sorted(directory.glob("*.safetensors"))
    if (directory / SINGLE).is_file():
        return _header(directory / SINGLE, storage)
    if len(shards) == 1:
        return _header(shards[0], storage)
    if pickled := sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern)):
        raise CheckpointError(
            f"{directory} has its weights in {', '.join(pickled[:4])}, in pickle format, which can run arbitrary code when it "
            "is read\n    expected: safetensors\n    fix: use the model's safetensors; or, if you trust it, load it with "
            "transformers and save it with `save_pretrained`"
        )
    listing = ", ".join(sorted(p.name for p in directory.iterdir())[:8]) if directory.is_dir() else "no such directory"
    fix = "restore the index" if shards else "save the model with `save_pretrained`, which writes safetensors"
    raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}\n    got: {listing}\n    fix: {fix}")


def _sharded_tensors(directory: Path, storage: Storage) -> dict[str, StoredTensor]:
    index = directory / INDEX
    try:
        weights: dict[str, str] = dict(read_json(directory, INDEX)["weight_map"])
        if not all(isinstance(file, str) for file in weights.values()):
            raise TypeError("the name of a shard is not a string")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {type(error).__name__} {error}") from None
    files = sorted({*weights.values(), *(p.name for p in directory.glob("model-*.safetensors"))})
    outside = [f for f in files if Path(f).name != f]
    if outside:
        raise CheckpointError(
            f"{index} names shards outside its directory: {', '.join(map(repr, outside[:4]))}\n"
            "    fix: download the index and the shards together"
        )
    missing = [f for f in files if not (directory / f).exists()]
    if missing:
        raise CheckpointError(f"{index} names missing shards: {', '.join(missing)}\n    fix: download them")
    headers = {f: _header(directory / f, storage) for f in files}
    problems = [
        f"{n}: the index says {f}, which does not contain it" for n, f in weights.items() if n not in headers[f]
    ]
    problems += [
        f"{n}: is in {f} but not in the index" for f, tensors in headers.items() for n in tensors if weights.get(n) != f
    ]
    if problems:
        raise problem_list(f"{index} does not match its shards", problems, "download the index and the shards together")
    return {n: headers[f][n] for n, f in weights.items()}


def _header(file: Path, storage: Storage) -> dict[str, StoredTensor]:
    size = member(file.parent, file.name).stat().st_size
    try:
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if not 2 <= length <= size - 8:
                raise ValueError(f"the header length is {length} bytes, but the file has {size}")
            if length > HEADER_BYTES:
                raise ValueError(f"the header length is {length:,} bytes, more than the maximum of {HEADER_BYTES:,}")
            header: dict[str, Any] = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        tensors = {}
        for name, info in header.items():
            begin, end = info["data_offsets"]
            if not all(type(n) is int and n >= 0 for n in (*info["shape"], begin, end)):
                raise ValueError(f"{name} has the shape {info['shape']} and the offsets {info['data_offsets']}")
            tensors[name] = StoredTensor(
                file, info["dtype"], tuple(info["shape"]), 8 + length + begin, end - begin, storage, name
            )
    except RecursionError:
        raise CheckpointError(f"{file} is not a safetensors file: its header is nested too deeply") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error}\n    fix: download it again") from None
    expected_start = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].bytes)):
        if tensor.start != expected_start:  # the format does not allow gaps or overlaps
            raise CheckpointError(f"{file}: there is a gap or an overlap before {name}\n    fix: download it again")
        expected_start += tensor.bytes
    if size != expected_start:
        raise CheckpointError(
            f"{file} {'is truncated' if size < expected_start else 'does not match its header'}\n"
            f"    got: {size} bytes\n    expected: {expected_start} bytes\n    fix: download it again"
        )
    return tensors


def check_readable(tensors: Iterable[StoredTensor], dtypes: Mapping[str, Any] = DTYPES) -> None:
    """Raise `CheckpointError` if a tensor's dtype is not one of `dtypes`, or its bytes do not match its shape.

    Only pass tensors that will be read. Files also contain buffers, such as GPT-2's masks in uint8 or bool.
    """
    for tensor in tensors:
        if str(tensor.dtype) not in dtypes:
            raise CheckpointError(
                f"{tensor.file}: {tensor.name} has the dtype {tensor.dtype}\n    expected: one of {', '.join(dtypes)}\n"
                "    fix: use files whose quantization_config in config.json describes their quantized weights, or convert "
                "the model to bfloat16 first"
            )
        if tensor.bytes != math.prod(tensor.shape) * np.dtype(dtypes[tensor.dtype]).itemsize:
            raise CheckpointError(
                f"{tensor.file}: {tensor.name} {list(tensor.shape)} has {tensor.bytes} bytes\n    fix: download it again"
            )


SHOWN = 12
"""Number of problems that an error lists."""


def problem_list(heading: str, problems: Sequence[str], fix: str) -> CheckpointError:
    """Return a single error that lists all problems."""
    more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    lines = "\n".join(f"    {p}" for p in [*problems[:SHOWN], *more])
    return CheckpointError(f"{heading}\n{lines}\n    fix: {fix}")


def check_tensors(
    stored: Mapping[str, StoredTensor], expected: Mapping[str, Tensor], spare: Iterable[str], location: Path
) -> None:
    """Compare the tensors of a directory with those that the model needs.

    Args:
        stored: Tensors in the directory.
        expected: Tensors that the model needs.
        spare: Additional names that may exist.
        location: Directory, for use in the error message.

    Raises:
        CheckpointError: If tensors are missing or unused, or have the wrong shape. The message lists all of them.
    """
    stray = sorted(stored.keys() - expected.keys() - set(spare))
    missing = [name for name in expected if name not in stored]
    wrong = [name for name, t in expected.items() if name in stored and stored[name].shape != t.shape]
    problems: list[str] = []
    for name in missing:
        close = nearest(name, stray, limit=1) if len(problems) < SHOWN else ()  # it takes long for many names
        problems.append(f"missing: {name} {list(expected[name].shape)}" + (f" (nearest: {close[0]})" if close else ""))
    for name in wrong:
        tensor = expected[name]
        problems.append(
            f"shape: {name}: got {list(stored[name].shape)}, expected {list(tensor.shape)}{_origin(tensor)}"
        )
    kinds = name_kinds(expected)
    for name in stray:
        close = nearest(name_kinds([name])[0], kinds, limit=1) if len(problems) < SHOWN and not missing else ()
        problems.append(f"unused: {name} {list(stored[name].shape)}" + (f" (nearest: {close[0]})" if close else ""))
    if problems:
        rule = ", or cover unused tensors with a rule or `ignored` of the family" if stray and not missing else ""
        raise problem_list(
            f"the weights in {location} do not match the model in its config.json",
            problems,
            f"use the config.json and the weights from the same model{rule}",
        )


def _origin(tensor: Tensor) -> str:
    """Describe the parameters of a tensor whose layout differs from theirs."""
    paths = ", ".join(part.path for part in tensor.parts)
    return f", from {paths} as {tensor.rule.pattern!r}" if tensor.rule.pattern else ""


def name_kinds(names: Iterable[str]) -> list[str]:
    """Return tensor names with the numbers of layers and experts replaced by `*`."""
    return sorted({re.sub(r"(^|(?<=\.))\d+(?=\.)", "*", n) for n in names})


OutputTensor = tuple[str, str, tuple[int, ...]]
"""(name, dtype code, shape) of a tensor to write."""


def shards(tensors: Iterable[OutputTensor], limit: int = SHARD_BYTES) -> list[list[OutputTensor]]:
    """Group tensors into files of at most `limit` bytes each, in order."""
    files: list[list[OutputTensor]] = [[]]
    free = limit
    for tensor in tensors:
        size = _bytes(tensor)
        if files[-1] and size > free:
            files.append([])
            free = limit
        files[-1].append(tensor)
        free -= size
    return files


def check_space(directory: Path, tensors: Iterable[OutputTensor]) -> None:
    """Raise `RequestError` if the disk has no room for the tensors. The directory does not have to exist yet."""
    existing = next(p for p in (directory.parent, *directory.absolute().parents) if p.exists())
    need, free = sum(map(_bytes, tensors)), shutil.disk_usage(existing).free
    if need > free:
        raise RequestError(
            f"{directory}: not enough disk space; nothing was written\n    got: {free:,} bytes free\n    expected: {need:,} bytes"
            "\n    fix: free some space, use a DIR on another disk, or export with --dtype bfloat16"
        )


def write_shard(file: Path, tensors: Sequence[OutputTensor], values: Iterator[np.ndarray]) -> None:
    """Write one file. `values` yields the tensors one at a time, in order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, code, shape in tensors:
        size = _bytes((name, code, shape))
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little"))
        handle.write(text)
        for _ in tensors:
            value = np.ascontiguousarray(next(values))
            handle.write(value.reshape(-1).view(np.uint8).data)
        handle.flush()
        os.fsync(handle.fileno())


def write(directory: Path, files: Sequence[Sequence[OutputTensor]], values: Iterator[np.ndarray]) -> None:
    """Write all shards, and an index if there are several."""
    names = (
        [SINGLE]
        if len(files) == 1
        else [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    )
    for name, tensors in zip(names, files, strict=True):
        write_shard(directory / name, tensors, values)
    if len(files) > 1:
        total = sum(_bytes(t) for tensors in files for t in tensors)
        weight_map = {t[0]: name for name, tensors in zip(names, files, strict=True) for t in tensors}
        body = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(body, indent=2, sort_keys=True) + "\n", "utf-8")


def _bytes(tensor: OutputTensor) -> int:
    return int(np.prod(tensor[2])) * np.dtype(DTYPES[tensor[1]]).itemsize
