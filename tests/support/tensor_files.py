"""Safetensors files with any dtypes, for tests of quantized weights."""

import json
import math

import numpy as np

from axlearn_plugins_models.huggingface.files import DTYPES, PACKED, stored_tensors

CODES = {np.dtype(dtype): code for code, dtype in {**DTYPES, **PACKED}.items()}


def write_tensors(file, arrays):
    """Write {name: array} to a safetensors file."""
    header, offset = {}, 0
    for name, array in arrays.items():
        shape, size = list(array.shape), math.prod(array.shape) * array.dtype.itemsize
        header[name] = {"dtype": CODES[array.dtype], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    content = b"".join(np.ascontiguousarray(a).tobytes() for a in arrays.values())
    file.write_bytes(len(text).to_bytes(8, "little") + text + content)


def store_tensors(directory, arrays):
    """Write {name: array} to a directory, and return its `StoredTensor`s."""
    write_tensors(directory / "model.safetensors", arrays)
    return stored_tensors(directory)
