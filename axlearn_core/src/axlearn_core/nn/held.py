"""What a module may hold: arrays in `nnx.Variable`s, other values as plain attributes.

An array in a plain attribute would be compiled into each program as a constant, and be missing from checkpoints. A module of
Linen or Equinox keeps no variables of its own, so that its parameters would be lost.
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
"""Module of the base class -> the library, and the component that makes a layer of its modules."""


class UnfitPart(ConfigError):
    """A part of a model that cannot be one; `node` is its config, and paths are relative to it."""

    def __init__(self, problems: Iterable[Problem], node: Node[Any]):
        super().__init__(problems)
        self.node = node


def library_of(value: object) -> tuple[str, str] | None:
    """(library, component for it) of a module of another library."""
    for cls in type(value).__mro__:
        for module, library in LIBRARIES.items():
            if cls.__name__ == "Module" and (cls.__module__ == module or cls.__module__.startswith(f"{module}.")):
                return library
    return None


def check_part(part: object, node: Node[Any]) -> Any:
    """`part`, built from `node`, when it can stand in a model.

    Raises:
        UnfitPart: it is a module of Linen or Equinox, or holds one, or holds arrays outside of variables, or random keys that
            are not of a stream.
    """
    library = library_of(part)
    problems = [_foreign("", part, *library)] if library else [*_problems(part)] if isinstance(part, nnx.Module) else []
    if problems:
        raise UnfitPart(problems, node)
    return part


def at_path(error: UnfitPart, config: Node[Any]) -> ConfigError:
    """The error with the paths of its parts in the config of a model."""
    path = _model_path(config, lambda value: value is error.node)
    return ConfigError(attrs.evolve(p, path=f"{path} ({p.path})" if p.path else path) for p in error.problems)


def _model_path(config: Node[Any], is_it: Callable[[Any], bool]) -> str:
    path = next((path for path, value in walk(config) if is_it(value)), "")
    return f"model.{path}" if path else "model"


def refused_by_flax(error: ValueError, config: Node[Any]) -> ConfigError | None:
    """What flax says of arrays in a plain attribute, as an error of the config; None for other errors."""
    match = re.search(r"on value of type '<class '([^']+)'>' assigned to static attribute '(\w+)' of Pytree type "
                     r"'<class '([^']+)'>'", str(error))  # fmt: skip
    if match is None:
        return None
    value, attribute, holder = match.groups()
    path = _model_path(config, lambda v: isinstance(v, Node) and qualified_name(type(v)).replace(":", ".") == holder)
    return ConfigError(_array(path, attribute, value))


def check_stateless(part: object, path: str) -> Any:
    """`part`, of an experiment beside the model, when neither it nor one of its attributes is a module with variables.

    Raises:
        ConfigError: the training state holds no variables but the model's.
    """
    members = {path: part, **{f"{path} ({name})": value for name, value in getattr(part, "__dict__", {}).items()}}
    problems = [
        Problem(
            path=location,
            message="is a module with variables in a place that cannot have them",
            got=f"{type(value).__name__} with {', '.join('.'.join(map(str, k)) for k, _ in flat[:3])}",
            expected="a part without variables: the training state holds those of the model",
            fix="put the module into the model",
        )
        for location, value in members.items()
        if isinstance(value, nnx.Module) and (flat := nnx.to_flat_state(nnx.state(value)))
    ]
    if problems:
        raise ConfigError(problems)
    return part


def check_seeds(model: object, draws: bool) -> None:
    """Checks that dropout has random numbers to draw; `draws`: the model has a stream, which may be passed in a call.

    Raises:
        ConfigError: a model that never draws has dropout, which would drop nothing.
    """
    if not draws and (problem := _check_random_keys(model)):
        raise problem


def unseeded(error: ValueError, model: object) -> ConfigError | None:
    """What flax says of dropout without random numbers, as an error of the config; None for other errors."""
    return _check_random_keys(model) if "no `rngs` argument" in str(error) else None


def _check_random_keys(model: Any) -> ConfigError | None:
    modules = [p for p, m in nnx.iter_modules(model) if isinstance(m, nnx.Dropout) and _draws_nothing(m)]
    problems = [
        Problem(
            path=f"model ({_join_path(path)})",
            message="draws random numbers from a stream without a seed",
            got="nnx.Dropout without rngs",
            fix="nnx.Dropout(rate, rngs=rngs), with the rngs of the constructor: its streams are seeded in each step",
        )
        for path in modules
    ]
    return ConfigError(problems) if problems else None


def _draws_nothing(dropout: nnx.Dropout) -> bool:
    return dropout.rngs is None and bool(dropout.rate) and not dropout.deterministic


def _problems(module: nnx.Module) -> Iterator[Problem]:
    arrays: dict[tuple[Any, ...], tuple[str, bool]] = {}  # path -> what lies there, and whether it is a random key
    for key, value in nnx.to_flat_state(nnx.state(module)):
        if not isinstance(value, nnx.Variable):
            arrays[key] = _describe(value)
        elif not is_stream(value) and isinstance(value.get_value(), ARRAYS) and is_key(value.get_value()):
            arrays[key] = f"a random key in {type(value).__name__}", True
    for path, part in nnx.iter_modules(module):
        for name, value in vars(part).items():
            # Within a transformation of flax, what is traced is not in the state.
            leaves = jax.tree.leaves(value) if isinstance(value, ARRAYS | list | tuple | dict) else ()
            if traced := [x for x in leaves if isinstance(x, ARRAYS)]:
                arrays[*path, name] = _describe(traced[0])
            elif not name.startswith("to_nnx__") and (library := library_of(value)):
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
        message=f"is a module of {library}, whose parameters the training state would not hold",
        got=f"{cls.__module__}.{cls.__qualname__}",
        expected="an nnx.Module",
        fix=f"wrap it: {{type: {component}, module: ...}} (of axlearn-plugins-models)",
    )


def _array(path: str, attribute: str, value: str, key: bool = False) -> Problem:
    if key:
        fix = f"self.{attribute} = rngs.fork(), or the stream rngs.{attribute}.fork(): streams are seeded in each step"
        return Problem(path=path, message=f"{attribute!r} holds a random key without a seed", got=value, fix=fix)
    return Problem(
        path=path,
        message=f"{attribute!r} holds arrays outside of variables: programs would have them as constants, checkpoints "
        "would not have them",
        got=value,
        fix=f"self.{attribute} = nnx.Param(...) if it is trained, nnx.Variable(...) if not; numbers as a tuple if they are few; "
        "a module of Equinox through equinox-layer (of axlearn-plugins-models)",
    )
