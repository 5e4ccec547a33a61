"""Base class for layers that wrap other libraries' modules: variables, axis names, dtypes and a sample input."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import REQUIRED, Node, matches, node
from axlearn_core.contracts.arrays import is_array
from axlearn_core.errors import ConfigError, Problem, nearest
from axlearn_core.nn.layer import Layer, Precision

T_co = TypeVar("T_co", covariant=True)
Path = tuple[str, ...]


class Arrays(nnx.Module):
    """Holds variables as attributes. The variable `a.b` is the attribute `b` of a nested `Arrays` named `a`."""


@attrs.frozen
class Structure:
    """The parts of a module that are not arrays, hidden from flax. Equal structures compute the same function."""

    value: Any


class WrappedLayer(Layer):
    """A layer that wraps a module from a different library.

    Its parameters are at `module.<path>`, with the library's names.

    Attributes:
        deterministic: True in evaluation; flax sets it.
    """

    @node
    class Config(Layer.Config[T_co]):
        """The wrapped module, and facts that the library does not provide.

        Attributes:
            module: Module to wrap, as a class or function passed to `configure`, or as a registered component.
            input_shape: Shape of the sample input that the module is built with. None means [1, 1, D], if the parent offers
                D as `input_dim` or `dim`.
            axes: Pattern of parameter paths below `module` -> one logical axis name (or null) per dimension. Parameters
                that match no pattern are replicated on every device.
        """

        module: Node[Any] = REQUIRED
        input_shape: tuple[int, ...] | None = None
        axes: Mapping[str, tuple[str | None, ...]] = {}

    library = ""

    def __init__(self, cfg: Config, *, precision: Precision):
        super().__init__(cfg, precision=precision)
        self.deterministic = False
        self.module = Arrays()

    def sample(self, offered: Mapping[str, Any]) -> jax.Array:
        """Return the sample input: zeros in the compute dtype.

        Raises:
            ConfigError: If neither the config nor the parent determines the shape.
        """
        shape = self.cfg.input_shape
        if shape is None:
            dims = offered.get("input_dims") or [d for d in (offered.get("input_dim"), offered.get("dim")) if d][:1]
            if not dims:
                raise ConfigError(
                    Problem(
                        path="input_shape",
                        message=f"{self.library} modules need a sample input, and its shape is unknown here",
                        fix="set input_shape, for instance to [1, 1, 64]",
                    )
                )
            shape = (1, 1, *dims)
        return jnp.zeros(shape, self.precision.compute)

    def keep(
        self, path: Path, variable: type[nnx.Variable], value: jax.Array, names: Sequence[str | None] | None
    ) -> None:
        """Create a variable at `module.<path>`. `names` are its logical axes, or None if the library provides none."""
        names = self._axes(".".join(path)) or names
        holder = self.module
        for part in path[:-1]:
            if not hasattr(holder, part):
                setattr(holder, part, Arrays())
            holder = getattr(holder, part)
        if isinstance(getattr(holder, path[-1], None), nnx.Module | nnx.Variable):
            raise ConfigError(
                Problem(path="module", message=f"the {self.library} module has two arrays at the path {'.'.join(path)}")
            )
        if names is not None and len(names) != value.ndim:
            raise ConfigError(
                Problem(
                    path=f"axes ({'.'.join(path)})",
                    message="must name one logical axis per dimension",
                    got=str(tuple(names)),
                    expected=f"{value.ndim} names, for the shape {value.shape}",
                )
            )
        metadata = {} if names is None else {"out_sharding": tuple(names), "eager_sharding": False}
        setattr(holder, path[-1], variable(value, **metadata))

    def _axes(self, path: str) -> tuple[str | None, ...] | None:
        return next((names for pattern, names in self.cfg.axes.items() if matches(pattern, path)), None)

    def check_axes(self, paths: Iterable[Path]) -> None:
        """Raise `ConfigError` if a pattern of `axes` matches none of the parameters at `paths`."""
        dotted_paths = [".".join(path) for path in paths]
        problems = [
            Problem(
                path=f"axes.{pattern}",
                message=f"matches no parameter of the {self.library} module",
                expected=f"one of {', '.join(dotted_paths)}",
                nearest=nearest(pattern, dotted_paths),
            )
            for pattern in self.cfg.axes
            if not any(matches(pattern, path) for path in dotted_paths)
        ]
        if problems:
            raise ConfigError(problems)

    def variable(self, path: Path) -> nnx.Variable:
        """Return the variable at `module.<path>`."""
        holder: Any = self.module
        for part in path:
            holder = getattr(holder, part)
        return holder

    def computes(self, tree: Any) -> Any:
        """Cast the floating-point arrays of a tree to the compute dtype."""
        return cast(tree, self.precision.compute)


def cast(tree: Any, dtype: str) -> Any:
    """Cast the floating-point arrays of a tree to a dtype."""

    def convert(x: Any) -> Any:
        return x.astype(dtype) if is_array(x) and jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(convert, tree)


def wrong_module(got: Any, library: str) -> ConfigError:
    """Return the error for a config that builds something other than a module of the library."""
    cls = type(got)
    return ConfigError(
        Problem(
            path="module",
            message=f"does not build a module of {library}",
            got=f"{cls.__module__}.{cls.__qualname__}",
            expected=f"a class derived from {library}'s Module",
        )
    )
