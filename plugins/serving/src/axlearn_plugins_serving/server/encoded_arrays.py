"""Arrays in request bodies."""

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.body import Body


class EncodedArray(Body):
    """An array of numbers.

    Attributes:
        shape: Shape of the array.
        data: Base64 of the bytes of its numbers, little-endian and with the last axis contiguous.
    """

    dtype: Literal["float32", "float16", "int32", "uint8"]
    shape: Annotated[list[Annotated[int, Field(ge=1, lt=2**31)]], Field(min_length=1, max_length=8, fail_fast=True)]
    data: str


def decode_arrays(arrays: Mapping[str, EncodedArray], param: str) -> dict[str, np.ndarray]:
    """Return the arrays of a field of a request.

    Raises:
        ApiError: 400 if the data are not base64, do not fit the shape, or contain numbers that are not finite.
    """
    return {name: _decode(array, f"{param}.{name}.data") for name, array in arrays.items()}


def _decode(array: EncodedArray, param: str) -> np.ndarray:
    try:
        data = base64.b64decode(array.data, validate=True)
    except (binascii.Error, ValueError):
        raise _wrong(param, "expected base64") from None
    dtype = np.dtype(array.dtype).newbyteorder("<")
    size = dtype.itemsize * math.prod(array.shape)
    if len(data) != size:
        raise _wrong(param, f"{len(data)} bytes, but {array.dtype} {array.shape} has {size}")
    values: np.ndarray[Any, Any] = np.frombuffer(data, dtype).reshape(array.shape).astype(array.dtype)
    if dtype.kind == "f" and not np.isfinite(values).all():
        raise _wrong(param, "expected finite numbers")
    return values


def _wrong(param: str, reason: str) -> ApiError:
    return ApiError(400, f"{param}: {reason}", param=param)
