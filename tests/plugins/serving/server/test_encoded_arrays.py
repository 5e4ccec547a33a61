"""Arrays in requests: they reach the model, and wrong ones are refused with the path of the field."""

import base64

import httpx
import numpy as np
import pytest

from axlearn_plugins_serving.local_engine import serve
from support.image_models import COUNT, SIZES, alone, captioner, prompts_with_images
from support.server_thread import serving


@pytest.fixture(scope="module")
def server():
    with serving(serve(captioner(), set=SIZES, warm_up=False).engine) as server:
        yield server


def encode(array):
    return {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "data": base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode(),
    }


def post(server, prompt, extras, path="/v1/completions", **fields):
    body = {"prompt": prompt, "temperature": 0, "max_tokens": COUNT, "ignore_eos": True, "return_token_ids": True}
    return httpx.post(server.url + path, json={**body, "extras": extras, **fields}, timeout=120)


def test_arrays_reach_the_model(server):
    cases = prompts_with_images(3, seed=1, without=1)
    for (prompt, extras), expected in zip(cases, alone(captioner(), cases), strict=True):
        answer = post(server, prompt, {name: encode(x) for name, x in extras.items()}).json()
        assert tuple(answer["choices"][0]["token_ids"]) == expected


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"data": "a-b"}, "extras.images.data", "expected base64"),
        ({"shape": [1, 4]}, "extras.images.data", "12 bytes, but float32 [1, 4] has 16"),
        ({"shape": [2, 3], "data": encode(np.ones((2, 3), np.float32))["data"]}, "extras", "must have one row"),
        ({"shape": [1, 0]}, "extras.images.shape[1]", "greater than or equal to 1"),
        ({"dtype": "float64"}, "extras.images.dtype", "'float32', 'float16', 'int32' or 'uint8'"),
        (
            {"data": encode(np.full((1, 3), np.nan, np.float32))["data"]},
            "extras.images.data",
            "expected finite numbers",
        ),
    ],
)
def test_wrong_arrays_name_their_field(server, change, param, message):
    answer = post(server, [2, 3], {"images": {**encode(np.ones((1, 3), np.float32)), **change}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]


def test_an_array_that_the_model_does_not_read_is_refused(server):
    error = post(server, [2, 3], {"image": encode(np.ones((1, 3), np.float32))}).json()["error"]
    assert error["param"] == "extras"
    assert "does not read extras['image']" in error["message"]


def test_several_prompts_have_no_arrays(server):
    answer = post(server, [[2, 3], [4]], {"images": encode(np.ones((1, 3), np.float32))})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "extras")
