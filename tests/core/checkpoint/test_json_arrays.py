"""Trees of JSON values and arrays keep their values, dtypes and shapes as JSON."""

import json

import numpy as np

from axlearn_core.checkpoint.json_arrays import decode_arrays, encode_arrays


def test_arrays_in_a_tree_of_json_values_are_restored_bit_by_bit():
    tree = {
        "step": 3,
        "rows": [
            {"tokens": np.arange(5, dtype=np.int32), "logprobs": np.array([np.nan, -0.0, 1e-45], np.float32)},
            {"tokens": np.zeros((0, 2), np.int64), "text": 'a "quoted" line', "none": None},
        ],
    }
    decoded = decode_arrays(json.loads(json.dumps(encode_arrays(tree))))
    assert decoded["step"] == 3
    assert decoded["rows"][1]["text"] == 'a "quoted" line'
    assert decoded["rows"][1]["none"] is None
    for i, name in ((0, "tokens"), (0, "logprobs"), (1, "tokens")):
        got, expected = decoded["rows"][i][name], tree["rows"][i][name]
        assert (got.dtype, got.shape, got.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def test_an_array_alone_is_a_tree():
    assert decode_arrays(encode_arrays(np.float32([[1.5]]))).tolist() == [[1.5]]
