"""A model as pure functions over a flat dict of parameters: `{"decoder.layer.attention.query.weight": array}`.

The keys are the paths of the modules, so that path patterns, checkpoints and name tables of other libraries all speak of a
parameter by one name.
"""

from collections.abc import Callable
from typing import Any

import attrs
import jax
from flax import nnx

from axlearn_core.config import Node
from axlearn_core.errors import ConfigError, Problem

Params = dict[str, Any]


@attrs.frozen(eq=False)
class Functional:
    """A model split into its structure and its parameters.

    Attributes:
        abstract: path -> `jax.ShapeDtypeStruct` of each parameter.
        axes: path -> logical axis name (or None) of each dimension.
    """

    abstract: Params
    axes: dict[str, tuple[str | None, ...]]
    _make: Callable[[jax.Array], Any]
    _graph: Any
    _keys: tuple[tuple[Any, ...], ...]
    _template: tuple[Any, ...]

    @classmethod
    def of(cls, config: Node[Any], **offered: Any) -> "Functional":
        """Builds the model abstractly, which allocates nothing. `offered` goes to the config's `build` besides `rngs`."""

        def make(key: jax.Array) -> Any:
            return config.build(rngs=nnx.Rngs(key), **offered)

        graph, state = nnx.split(nnx.eval_shape(lambda: make(jax.random.key(0))))
        abstract, axes, template = {}, {}, []
        flat = nnx.to_flat_state(state)
        for key, variable in flat:
            path = ".".join(map(str, key))
            if not isinstance(variable, nnx.Param):
                raise ConfigError(
                    Problem(
                        path=f"model ({path})",
                        message=f"the model holds a {type(variable).__name__}",
                        expected="parameters only (nnx.Param): the training state has no place for other variables",
                    )
                )
            value = variable.get_value()
            abstract[path] = jax.ShapeDtypeStruct(value.shape, value.dtype)
            axes[path] = _axes(path, variable, len(value.shape))
            template.append(variable)
        return cls(abstract, axes, make, graph, tuple(k for k, _ in flat), tuple(template))

    def init(self, key: jax.Array) -> Params:
        """Freshly initialised parameters. Traceable."""
        _, state = nnx.split(self._make(key))
        return {".".join(map(str, k)): v.get_value() for k, v in nnx.to_flat_state(state)}

    def bind(self, params: Params) -> Any:
        """The model with these parameters. Traceable; costs nothing at run time."""
        values = [v.replace(params[".".join(map(str, k))]) for k, v in zip(self._keys, self._template, strict=True)]
        return nnx.merge(self._graph, nnx.from_flat_state(list(zip(self._keys, values, strict=True))))

    @property
    def num_parameters(self) -> int:
        """How many numbers the model holds."""
        return sum(s.size for s in self.abstract.values())


def _axes(path: str, variable: Any, rank: int) -> tuple[str | None, ...]:
    meta = variable.get_metadata()
    names = meta.get("out_sharding") or meta.get("sharding_names") or meta.get("sharding")
    if names is None:
        return (None,) * rank
    if len(names) != rank:
        raise ConfigError(
            Problem(
                path=path, message="one logical axis per dimension", got=str(tuple(names)), expected=f"{rank} names"
            )
        )
    return tuple(names)


def count_parameters(config: Node[Any]) -> int:
    """How many numbers a model of this config holds; builds it abstractly."""
    return Functional.of(config).num_parameters
