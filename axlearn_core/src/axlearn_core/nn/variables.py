"""Model state other than parameters: running statistics, router biases, amax histories.

A module writes its variables as `flax.nnx` modules do (`self.mean[...] = value`). Traced values cannot leave a scan, a
rematerialized function, or a `shard_map` through a side effect. Code that runs a module inside one of these
transformations collects the new values (`written`), returns them, and writes them to the outer module (`write`). `Functional`
does this for the whole model.

If a module has an `end_step` method, it is called once per training step, after the last microbatch. Use a `StepTotal` to
sum values over microbatches.
"""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

Values = dict[str, jax.Array]


class StepTotal(nnx.Variable):
    """A sum over the microbatches of a training step. It starts at zero, `end_step` reads it, and it is never saved."""


class LearnedVariable(nnx.Variable):
    """A variable that training updates without a gradient.

    Rules that freeze the parameters of its module also freeze it.
    """


def is_variable(value: object) -> bool:
    """Return True for model state other than parameters, random streams, and intermediate results."""
    return isinstance(value, nnx.Variable) and not isinstance(value, (nnx.Param, nnx.RngState, nnx.Intermediate))


def get_values(state: Any) -> Values:
    """Return the arrays of the variables in an `nnx.State` by dotted path."""
    return {_path(k): v.get_value() for k, v in nnx.to_flat_state(state) if is_variable(v)}


def written(module: object, before: Values) -> Values:
    """Return the variables whose values differ from those in `before`, within the same trace."""
    if not before:
        return {}
    now = get_values(nnx.state(module))
    return {path: value for path, value in now.items() if path in before and value is not before[path]}


def write(module: object, values: Mapping[str, jax.Array]) -> None:
    """Write values to the variables of a module."""
    if values:
        state = [
            (k, v.replace(values[_path(k)])) for k, v in nnx.to_flat_state(nnx.state(module)) if _path(k) in values
        ]
        nnx.update(module, nnx.from_flat_state(state))


def replace_values(state: Any, values: Mapping[str, jax.Array]) -> Any:
    """Replace the values of some variables in an `nnx.State`."""
    if not values:
        return state
    flat = nnx.to_flat_state(state)
    return nnx.from_flat_state([(k, v.replace(values[_path(k)]) if _path(k) in values else v) for k, v in flat])


def _path(key: tuple[Any, ...]) -> str:
    return ".".join(map(str, key))
