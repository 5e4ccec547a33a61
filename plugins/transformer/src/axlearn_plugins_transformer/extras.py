"""Other inputs of a prompt than its tokens, such as the features of images."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jax.interpreters.partial_eval import dce_jaxpr

from axlearn_core.errors import RequestError
from axlearn_plugins_transformer.causal_lm import TEXT_ENTRIES

Shapes = tuple[tuple[str, tuple[int, ...], str], ...]
"""Name, shape and dtype of each extra, in the order of the names."""


class ExtrasError(RequestError):
    """Raised if a model cannot read the extras of a prompt."""


def check_extras(extras: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the extras of a prompt as arrays, in the dtypes that JAX gives them.

    Raises:
        ExtrasError: If an extra is an entry of text, does not have one row, or is not an array of numbers.
    """
    arrays: dict[str, np.ndarray] = {}
    for name, value in extras.items():
        array = np.asarray(value)
        if name in TEXT_ENTRIES:
            raise ExtrasError(
                f"cannot generate: extras[{name!r}] is part of the prompt\n"
                f"    got: shape {list(array.shape)}\n    expected: a name other than {', '.join(sorted(TEXT_ENTRIES))}"
            )
        if array.ndim < 1 or array.shape[0] != 1:
            raise ExtrasError(
                f"cannot generate: extras[{name!r}] must have one row\n"
                f"    got: shape {list(array.shape)}\n    expected: [1, ...]"
            )
        if array.dtype.kind not in "biufc" and array.dtype != jnp.bfloat16:
            raise ExtrasError(
                f"cannot generate: extras[{name!r}] is not an array of numbers\n"
                f"    got: dtype {array.dtype}\n    expected: a dtype of JAX, such as float32"
            )
        converted = array.astype(dtypes.canonicalize_dtype(array.dtype), copy=False)
        if array.dtype.kind in "iu" and not np.array_equal(converted, array):
            raise ExtrasError(
                f"cannot generate: extras[{name!r}] has numbers that do not fit into {converted.dtype}\n"
                f"    got: {array.dtype} from {array.min()} to {array.max()}\n    fix: use smaller numbers, or floats"
            )
        arrays[name] = converted
    return arrays


def extra_shapes(extras: Mapping[str, np.ndarray]) -> Shapes:
    """Return the names, shapes and dtypes of arrays."""
    return tuple((name, array.shape, str(array.dtype)) for name, array in sorted(extras.items()))


def find_used(jaxpr: Any, before: Sequence[Any], extras: Mapping[str, Any]) -> list[str]:
    """Return the names of the extras that affect the outputs of a jaxpr.

    Args:
        jaxpr: The jaxpr.
        before: Arguments before the extras.
        extras: The extras, abstract.
    """
    _, used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=False)
    names = sorted(extras)  # JAX flattens mappings in this order
    begin = len(jax.tree.leaves(list(before)))
    return [name for name, is_used in zip(names, used[begin : begin + len(names)], strict=True) if is_used]


def check_used(extras: Mapping[str, Any], used: Sequence[str]) -> None:
    """Raise `ExtrasError` for an extra that has no effect on a model. `used` contains those that have one."""
    for name in (name for name in extras if name not in used):
        inputs = ", ".join(used)
        raise ExtrasError(
            f"cannot generate: the model does not read extras[{name!r}]\n"
            f"    got: {', '.join(extras)}\n    expected: inputs that change the output{inputs and f', such as {inputs}'}\n"
            "    fix: correct the name, or leave it out"
        )
