"""Express each of a learner's evaluation parameters as a function of a few arrays in the training state."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from axlearn_core.compose.functions import array_function
from axlearn_core.learn.paths import flatten, unflatten


@attrs.frozen(eq=False)
class Source:
    """Source of a parameter for evaluation.

    Attributes:
        spec: Shape and dtype.
        paths: Arrays of the training state that it depends on (`params.decoder.norm.weight`, `learner.ema...`).
        compute: Computes the parameter from these arrays. None if the parameter equals its only array.
    """

    spec: jax.ShapeDtypeStruct
    paths: tuple[str, ...]
    compute: Callable[[Sequence[jax.Array]], jax.Array] | None


def evaluation_sources(learner: Any, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Source]:
    """Trace `learner.evaluation_params` and return the source of each parameter by path.

    Args:
        learner: See `axlearn_core.contracts.parts.Learner`.
        abstract: Shapes and dtypes of the parameters.
    """
    params = dict(abstract)
    state = jax.eval_shape(learner.init, params)
    inputs = [f"learner.{p}" for p in flatten(state)] + [f"params.{p}" for p in flatten(params)]
    traced, outputs = jax.make_jaxpr(learner.evaluation_params, return_shape=True)(state, params)
    jaxpr = traced.jaxpr
    names: dict[Any, str] = dict(zip(jaxpr.invars, inputs, strict=True))
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    sources = {}
    for (path, spec), variable in zip(flatten(outputs).items(), jaxpr.outvars, strict=True):
        needed = [names[v] for v in _inputs(variable, names, makers)]
        direct = not isinstance(variable, Literal) and variable in names
        compute = None if direct else _function(learner, state, params, path, needed)
        sources[path] = Source(jax.ShapeDtypeStruct(spec.shape, spec.dtype), tuple(needed), compute)
    return sources


def _inputs(variable: object, names: Mapping[Any, str], makers: Mapping[Any, Any]) -> list[Any]:
    """Return the inputs that a variable of a jaxpr depends on."""
    if isinstance(variable, Literal):
        return []
    if variable in names:
        return [variable]
    operands = makers[variable].invars if variable in makers else ()
    return list(dict.fromkeys(v for operand in operands for v in _inputs(operand, names, makers)))


def _function(
    learner: Any, state: Any, params: Mapping[str, Any], path: str, needed: Sequence[str]
) -> Callable[[Sequence[jax.Array]], jax.Array]:
    def one(values: Sequence[jax.Array]) -> jax.Array:
        arguments = dict(zip(needed, values, strict=True))

        def fill(part: str, tree: object) -> Any:
            # XLA removes the zeros, since the parameter does not depend on them.
            leaves = {p: arguments.get(f"{part}.{p}", jnp.zeros(x.shape, x.dtype)) for p, x in flatten(tree).items()}
            return unflatten(tree, leaves)

        return flatten(learner.evaluation_params(fill("learner", state), fill("params", params)))[path]

    return array_function()(one)
