"""What a learner evaluates with, as a function of single arrays of the training state."""

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
    """Where a parameter for evaluation comes from.

    Attributes:
        spec: its shape and dtype.
        paths: the arrays of the training state that it is made of (`params.decoder.norm.weight`, `learner.ema...`).
        compute: makes it of those; None where it is the only one of them.
    """

    spec: jax.ShapeDtypeStruct
    paths: tuple[str, ...]
    compute: Callable[[Sequence[jax.Array]], jax.Array] | None


def evaluation_sources(learner: Any, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Source]:
    """Parameter path -> its source, by tracing `learner.evaluation_params`.

    Args:
        learner: see `axlearn_core.contracts.parts.Learner`.
        abstract: the parameters.
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
    """The inputs that a variable of a jaxpr depends on."""
    if isinstance(variable, Literal):
        return []
    if variable in names:
        return [variable]
    below = (v for of in (makers[variable].invars if variable in makers else ()) for v in _inputs(of, names, makers))
    return list(dict.fromkeys(below))


def _function(
    learner: Any, state: Any, params: Mapping[str, Any], path: str, needed: Sequence[str]
) -> Callable[[Sequence[jax.Array]], jax.Array]:
    def one(values: Sequence[jax.Array]) -> jax.Array:
        arguments = dict(zip(needed, values, strict=True))

        def fill(part: str, tree: object) -> Any:
            # XLA drops the zeros: nothing that `path` is made of depends on them.
            leaves = {p: arguments.get(f"{part}.{p}", jnp.zeros(x.shape, x.dtype)) for p, x in flatten(tree).items()}
            return unflatten(tree, leaves)

        return flatten(learner.evaluation_params(fill("learner", state), fill("params", params)))[path]

    return array_function()(one)
