"""What a module keeps in addition to parameters: running statistics, balancing biases, histories of magnitudes.

Inside one trace a module writes its variables as `flax.nnx` modules do (`self.mean[...] = value`). Values may not leak out of
a scan, a rematerialised function or a `shard_map`, so whoever runs a module inside one takes what it wrote (`written`), carries
it out, and puts it into the module outside (`write`). `Functional` does that for the whole model.

A module that has a method `end_step` gets one call of it per training step, after the last microbatch. What it needs from the
microbatches it adds up in a `StepTotal`.
"""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

Values = dict[str, jax.Array]


class StepTotal(nnx.Variable):
    """A sum over the microbatches of a training step: zero before the first one, read by `end_step`, and never stored."""


class LearnedVariable(nnx.Variable):
    """A part of the model that training changes by a rule of its own instead of a gradient.

    What freezes the parameters around it freezes it too.
    """


def is_variable(value: object) -> bool:
    """Whether a variable is state of the model: not a parameter, a random stream or an intermediate result."""
    return isinstance(value, nnx.Variable) and not isinstance(value, (nnx.Param, nnx.RngState, nnx.Intermediate))


def values_of(state: Any) -> Values:
    """Dotted path -> array, of the variables in an `nnx.State`."""
    return {_path(k): v.get_value() for k, v in nnx.to_flat_state(state) if is_variable(v)}


def written(module: object, before: Values) -> Values:
    """The variables of a module that were written since they had the values `before`, all within one trace."""
    if not before:
        return {}
    now = values_of(nnx.state(module))
    return {path: value for path, value in now.items() if path in before and value is not before[path]}


def write(module: object, values: Mapping[str, jax.Array]) -> None:
    """Puts values into the variables of a module."""
    if values:
        state = [
            (k, v.replace(values[_path(k)])) for k, v in nnx.to_flat_state(nnx.state(module)) if _path(k) in values
        ]
        nnx.update(module, nnx.from_flat_state(state))


def replaced(state: Any, values: Mapping[str, jax.Array]) -> Any:
    """An `nnx.State` with other values in some of its variables."""
    if not values:
        return state
    flat = nnx.to_flat_state(state)
    return nnx.from_flat_state([(k, v.replace(values[_path(k)]) if _path(k) in values else v) for k, v in flat])


def _path(key: tuple[Any, ...]) -> str:
    return ".".join(map(str, key))
