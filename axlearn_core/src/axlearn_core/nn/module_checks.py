"""Check the attributes of modules: arrays must be in `nnx.Variable`s, and other values are plain attributes.

An array in a plain attribute would be compiled into programs as a constant and would be missing from checkpoints. The
parameters of a Linen or Equinox module are not nnx variables and would be lost.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import jax
import numpy as np
from flax import nnx

from axlearn_core.config import Node, walk
from axlearn_core.config.flat import qualified_name
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.nn.randomness import is_key, is_stream

LIBRARIES = {"flax.linen.module": ("Linen", "linen-layer"), "equinox._module": ("Equinox", "equinox-layer")}
"""Library and wrapper component, keyed by the Python module of the library's base class."""


class UnfitPart(ConfigError):
    """A module that a model cannot contain. `node` is its config, and paths are relative to it."""

    def __init__(self, problems: Iterable[Problem], node: Node[Any]):
        super().__init__(problems)
        self.node = node


def find_library(value: object) -> tuple[str, str] | None:
    """Return a module's library, and the name of the component that wraps such modules, or None for other values."""
    for cls in type(value).__mro__:
        for module, library in LIBRARIES.items():
            if cls.__name__ == "Module" and (cls.__module__ == module or cls.__module__.startswith(f"{module}.")):
                return library
    return None


def check_part(part: object, node: Node[Any]) -> Any:
    """Return `part`, built from `node`, if a model can contain it.

    Raises:
        UnfitPart: If it is or contains a Linen or Equinox module, or if it has arrays outside variables or random keys
            outside streams.
    """
    library = find_library(part)
    problems = [_foreign("", part, *library)] if library else [*_problems(part)] if isinstance(part, nnx.Module) else []
    if problems:
        raise UnfitPart(problems, node)
    return part


def add_config_path(error: UnfitPart, config: Node[Any]) -> ConfigError:
    """Return the error with paths from the root of the model config."""
    path = _model_path(config, lambda value: value is error.node)
    return ConfigError(attrs.evolve(p, path=f"{path} ({p.path})" if p.path else path) for p in error.problems)


def _model_path(config: Node[Any], predicate: Callable[[Any], bool]) -> str:
    path = next((path for path, value in walk(config) if predicate(value)), "")
    return f"model.{path}" if path else "model"


def convert_flax_error(error: ValueError, config: Node[Any]) -> ConfigError | None:
    """Convert flax's error about arrays in a plain attribute to a config error. Return None for other errors."""
    match = re.search(r"on value of type '<class '([^']+)'>' assigned to static attribute '(\w+)' of Pytree type "
                     r"'<class '([^']+)'>'", str(error))  # fmt: skip
    if match is None:
        return None
    value, attribute, holder = match.groups()
    path = _model_path(config, lambda v: isinstance(v, Node) and qualified_name(type(v)).replace(":", ".") == holder)
    return ConfigError(_array(path, attribute, value))


def check_stateless(part: object, path: str) -> Any:
    """Return `part`, a component outside the model, if neither it nor an attribute is a module with variables.

    Raises:
        ConfigError: If there is such a module. The training state has variables only for the model.
    """
    members = {path: part, **{f"{path} ({name})": value for name, value in getattr(part, "__dict__", {}).items()}}
    problems = [
        Problem(
            path=location,
            message="is a module with variables outside the model",
            got=f"{type(value).__name__} with {', '.join('.'.join(map(str, k)) for k, _ in flat[:3])}",
            expected="a component without variables: the training state contains only the model's variables",
            fix="move the module into the model",
        )
        for location, value in members.items()
        if isinstance(value, nnx.Module) and (flat := nnx.to_flat_state(nnx.state(value)))
    ]
    if problems:
        raise ConfigError(problems)
    return part


def check_seeds(model: object, draws: bool) -> None:
    """Check that dropout has a source of random numbers.

    Args:
        model: The model.
        draws: True if the model has a random stream, which a call may pass to dropout.

    Raises:
        ConfigError: If a model without random streams has dropout, which would have no effect.
    """
    if not draws and (problem := _check_random_keys(model)):
        raise problem


def convert_seed_error(error: ValueError, model: object) -> ConfigError | None:
    """Convert flax's error about dropout without `rngs` to a config error. Return None for other errors."""
    return _check_random_keys(model) if "no `rngs` argument" in str(error) else None


def _check_random_keys(model: Any) -> ConfigError | None:
    modules = [p for p, m in nnx.iter_modules(model) if isinstance(m, nnx.Dropout) and _draws_nothing(m)]
    problems = [
        Problem(
            path=f"model ({_join_path(path)})",
            message="has no source of random numbers",
            got="nnx.Dropout without rngs",
            fix="nnx.Dropout(rate, rngs=rngs) with the rngs of the constructor, whose streams are seeded in each step",
        )
        for path in modules
    ]
    return ConfigError(problems) if problems else None


def _draws_nothing(dropout: nnx.Dropout) -> bool:
    return dropout.rngs is None and bool(dropout.rate) and not dropout.deterministic


def _problems(module: nnx.Module) -> Iterator[Problem]:
    arrays: dict[tuple[Any, ...], tuple[str, bool]] = {}  # path -> (description, whether it is a random key)
    for key, value in nnx.to_flat_state(nnx.state(module)):
        if not isinstance(value, nnx.Variable):
            arrays[key] = _describe(value)
        elif not is_stream(value) and isinstance(value.get_value(), ARRAYS) and is_key(value.get_value()):
            arrays[key] = f"a random key in {type(value).__name__}", True
    for path, part in nnx.iter_modules(module):
        for name, value in vars(part).items():
            # Inside a flax transformation, the state does not contain traced arrays.
            leaves = jax.tree.leaves(value) if isinstance(value, ARRAYS | list | tuple | dict) else ()
            if traced := [x for x in leaves if isinstance(x, ARRAYS)]:
                arrays[*path, name] = _describe(traced[0])
            elif not name.startswith("to_nnx__") and (library := find_library(value)):
                yield _foreign(_join_path((*path, name)), value, *library)
    for key, description in arrays.items():
        yield _array(_join_path(key[:-1]), str(key[-1]), *description)


ARRAYS = jax.Array | np.ndarray | jax.ShapeDtypeStruct


def _describe(array: Any) -> tuple[str, bool]:
    return f"{array.dtype}{list(array.shape)}", is_key(array)


def _join_path(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _foreign(path: str, module: object, library: str, component: str) -> Problem:
    cls = type(module)
    return Problem(
        path=path,
        message=f"is a module of {library}, whose parameters would be missing from the training state",
        got=f"{cls.__module__}.{cls.__qualname__}",
        expected="an nnx.Module",
        fix=f"wrap it: {{type: {component}, module: ...}} (in axlearn-plugins-models)",
    )


def _array(path: str, attribute: str, value: str, key: bool = False) -> Problem:
    if key:
        fix = f"self.{attribute} = rngs.fork(), or the stream rngs.{attribute}.fork(): streams are seeded in each step"
        return Problem(path=path, message=f"{attribute!r} holds a random key outside a stream", got=value, fix=fix)
    return Problem(
        path=path,
        message=f"{attribute!r} holds arrays outside variables: they would be constants in programs and missing from "
        "checkpoints",
        got=value,
        fix=f"self.{attribute} = nnx.Param(...) if it is trained, nnx.Variable(...) if not; a tuple for a few numbers; "
        "equinox-layer (in axlearn-plugins-models) for an Equinox module",
    )
