"""Trees of JSON values and NumPy arrays as JSON, for state that is not a part of the training state."""

import base64
import io
from collections.abc import Mapping
from typing import Any

import numpy as np

ARRAY = "__array__"
"""Key of an encoded array. Its value is the base64 encoding of a compressed `.npz` file."""


def encode_arrays(tree: Any) -> Any:
    """Return the tree as JSON values, in which arrays are compressed.

    Args:
        tree: Mappings, sequences, JSON values and arrays. Keys of mappings are strings.
    """
    if isinstance(tree, np.ndarray):
        buffer = io.BytesIO()
        np.savez_compressed(buffer, tree, allow_pickle=False)
        return {ARRAY: base64.b64encode(buffer.getvalue()).decode()}
    if isinstance(tree, Mapping):
        return {str(key): encode_arrays(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [encode_arrays(value) for value in tree]
    return tree


def decode_arrays(tree: Any) -> Any:
    """Return the tree that `encode_arrays` encoded. Tuples become lists."""
    if isinstance(tree, Mapping):
        if tree.keys() == {ARRAY}:
            with np.load(io.BytesIO(base64.b64decode(tree[ARRAY])), allow_pickle=False) as arrays:
                return arrays["arr_0"]
        return {key: decode_arrays(value) for key, value in tree.items()}
    return [decode_arrays(value) for value in tree] if isinstance(tree, list) else tree
