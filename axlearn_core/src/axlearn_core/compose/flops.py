"""Count the FLOPs of a function from its jaxpr. XLA's count includes the body of a scan only once."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr


def count_flops(function: Callable[..., Any], *args: object) -> int:
    """Return the FLOPs of the matrix multiplications and convolutions in `function(*args)`. A multiply-add counts as two.

    The body of a scan counts once per iteration, and the body of a `while` loop counts once. Only the most expensive branch of
    a conditional counts.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def equation_flops(eqn: Any) -> int:
    """Return the FLOPs of one equation of a jaxpr, excluding jaxprs that it calls."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        contracted = math.prod(eqn.invars[0].aval.shape[d] for d in params["dimension_numbers"][0][0])
        return 2 * contracted * math.prod(eqn.outvars[0].aval.shape)
    if name == "ragged_dot_general":  # each row is multiplied by one matrix, even if groups split the contraction
        ragged = params["ragged_dot_dimension_numbers"]
        lhs, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        summed = ragged.dot_dimension_numbers[0][0]
        groups = out[0] if ragged.lhs_ragged_dimensions[0] in summed else 1
        return 2 * math.prod(lhs[d] for d in summed) * math.prod(out) // groups
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        out_features = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) // out_features
    return 0


def called(params: Mapping[str, Any]) -> Any:
    """Return the jaxpr that an equation calls once (jit, remat, custom derivatives, or batching), or None."""
    values = (params.get(name) for name in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"))
    return next((jaxpr for value in values if (jaxpr := get_jaxpr(value)) is not None), None)


def get_jaxpr(value: object) -> Jaxpr | None:
    """Return the jaxpr of an equation's parameter, or None for other parameters."""
    value = value.jaxpr if isinstance(value, ClosedJaxpr) else value
    return value if isinstance(value, Jaxpr) else None


def mapped_devices(params: Mapping[str, Any]) -> int:
    """Return the number of devices that a `shard_map` splits its work over. Axes that are not manual do not count.

    The name of the parameter depends on the version of JAX.
    """
    names = ("newly_manual_axes", "manual_axes")
    axes = next((params[name] for name in names if name in params), params["mesh"].axis_names)
    return math.prod(params["mesh"].shape[axis] for axis in axes)


def _count(jaxpr: Any) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        total += equation_flops(eqn)
        if name == "cond":
            total += max(_count(b.jaxpr) for b in params["branches"])
        elif name == "scan":
            total += params["length"] * _count(params["jaxpr"].jaxpr)
        elif name == "while":
            total += _count(params["body_jaxpr"].jaxpr)
        elif name == "shard_map":
            total += mapped_devices(params) * _count(params["jaxpr"])
        else:
            inner = called(params)
            total += 0 if inner is None else _count(inner)
    return total
