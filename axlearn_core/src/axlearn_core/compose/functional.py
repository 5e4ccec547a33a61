"""A model as pure functions over flat dicts of arrays: `{"decoder.layer.attention.query.weight": array}`.

The keys are the paths of the modules, so that path patterns, checkpoints and name tables of other libraries all speak of an
array by one name. Three kinds of `nnx.Variable` are told apart: parameters (`nnx.Param`), random streams (`nnx.RngState`, see
`nn.randomness`), and all others, which are called the model's variables.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import jax
from flax import nnx

from axlearn_core.config import Node
from axlearn_core.errors import ConfigError, Problem, RequestError, nearest
from axlearn_core.nn import randomness

Params = dict[str, Any]
Axes = dict[str, tuple[str | None, ...]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelWeights:
    """The arrays that a model computes with: path -> array."""

    params: Params
    variables: Params


@attrs.frozen(eq=False)
class Functional:
    """A model split into its structure and its arrays.

    Attributes:
        abstract: path -> `jax.ShapeDtypeStruct` of each parameter.
        axes: path -> logical axis name (or None) of each dimension of a parameter.
        variables: path -> `jax.ShapeDtypeStruct` of each variable that is neither a parameter nor a random stream.
        variable_axes: as `axes`, of the variables.
        streams: path -> `jax.ShapeDtypeStruct` of each part of a random stream; empty where the model draws no numbers.
        batch_dependence: why the model depends on which rows are computed together; empty where it does not.
    """

    abstract: Params
    axes: Axes
    variables: Params
    variable_axes: Axes
    streams: Params
    batch_dependence: tuple[str, ...]
    _build: Callable[[jax.Array], Any] | None
    _training: Any
    _inference: Any
    _template: tuple[tuple[tuple[Any, ...], Any], ...]

    @classmethod
    def of(cls, config: Node[Any], **offered: Any) -> "Functional":
        """Builds the model abstractly, which allocates nothing. `offered` goes to the config's `build` besides `rngs`."""

        def build(key: jax.Array) -> Any:
            # Parameters have a stream of their own, so that a module that draws elsewhere does not change their values.
            return config.build(rngs=nnx.Rngs(params=key, default=jax.random.fold_in(key, 1)), **offered)

        return cls._of_module(nnx.eval_shape(lambda: build(jax.random.key(0))), build)

    @classmethod
    def of_module(cls, model: Any) -> "Functional":
        """Of a model that was built already; it cannot be initialised anew."""
        graph, state = nnx.split(model)
        return cls._of_module(nnx.eval_shape(lambda: nnx.merge(graph, state)), None)

    @classmethod
    def _of_module(cls, model: Any, build: Callable[[jax.Array], Any] | None) -> "Functional":
        training, state = nnx.split(model)
        template = tuple(nnx.to_flat_state(state))
        arrays: dict[str, Params] = {"params": {}, "variables": {}, "streams": {}}
        axes: dict[str, Axes] = {"params": {}, "variables": {}, "streams": {}}
        for key, variable in template:
            path, value = ".".join(map(str, key)), variable.get_value()
            if not hasattr(value, "shape"):
                raise ConfigError(_not_an_array(path, variable, value))
            kind = _kind(variable)
            arrays[kind][path] = jax.ShapeDtypeStruct(value.shape, value.dtype)
            if kind != "streams":
                axes[kind][path] = _axes(path, variable, len(value.shape))
        reasons = _batch_dependence(model, arrays["streams"])
        model.eval()
        inference, _ = nnx.split(model)
        return cls(
            arrays["params"], axes["params"], arrays["variables"], axes["variables"], arrays["streams"], reasons,
            build, training, inference, template,
        )  # fmt: skip

    @property
    def specs(self) -> ModelWeights:
        """The abstract weights."""
        return ModelWeights(self.abstract, self.variables)

    def init(self, key: jax.Array) -> Params:
        """Freshly initialised parameters. Traceable."""
        return self.init_arrays(key)[0]

    def init_arrays(self, key: jax.Array) -> tuple[Params, Params]:
        """Freshly initialised parameters, and variables. Traceable."""
        assert self._build is not None, "a model that was built already is not initialised"
        _, state = nnx.split(self._build(key))
        flat = [(".".join(map(str, k)), v) for k, v in nnx.to_flat_state(state)]
        params = {path: v.get_value() for path, v in flat if path in self.abstract}
        return params, {path: v.get_value() for path, v in flat if path in self.variables}

    def bind(self, params: Params, variables: Params | None = None, key: jax.Array | None = None) -> Any:
        """The model with these arrays. Traceable; costs nothing at run time.

        Args:
            params: path -> array.
            variables: path -> array; may be left out where the model has none.
            key: what the random numbers of this call are derived from. Without one the model is in evaluation: it draws
                nothing and its variables are only read (`deterministic` and `use_running_average`, as flax calls it).

        Raises:
            RequestError: the model has variables and they are not given.
        """
        given = variables or {}
        if missing := [path for path in self.variables if path not in given]:
            close = nearest(missing[0], given, limit=1)
            raise RequestError(
                f"the model has variables that it was not given: {', '.join(missing[:3])}"
                + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
                + (f"\n    nearest there: {close[0]}" if close else "")
                + "\n    fix: bind(params, variables), with the variables of the same state or checkpoint"
            )

        def value(path: str) -> Any:
            if path in self.abstract:
                return params[path]
            return given[path] if path in self.variables else randomness.derive(self.streams[path], path, key)

        values = [(k, v.replace(value(".".join(map(str, k))))) for k, v in self._template]
        graph = self._inference if key is None else self._training
        return nnx.merge(graph, nnx.from_flat_state(values))

    def describe(self) -> Any:
        """The model with abstract arrays: for what its modules say of themselves."""
        return self.bind(self.abstract, self.variables)

    def weights_of(self, model: Any) -> ModelWeights:
        """The arrays of a model of this structure."""
        flat = {".".join(map(str, k)): v.get_value() for k, v in nnx.to_flat_state(nnx.state(model))}
        return ModelWeights({p: flat[p] for p in self.abstract}, {p: flat[p] for p in self.variables})

    def variables_of(self, model: Any) -> Params:
        """The variables of a bound model, after its call.

        Raises:
            RequestError: the call made a variable that the model did not have.
        """
        if not self.variables:
            return {}
        flat = {".".join(map(str, k)): v for k, v in nnx.to_flat_state(nnx.state(model))}
        for path, variable in flat.items():
            known = path in self.variables or path in self.abstract or path in self.streams
            if not known and not isinstance(variable, nnx.Intermediate):
                raise RequestError(
                    f"the variable {path} ({type(variable).__name__}) appeared when the model was called\n"
                    "    fix: make it in the module's constructor, so that training state and checkpoints have a place for it"
                )
        return {path: flat[path].get_value() for path in self.variables}

    @property
    def num_parameters(self) -> int:
        """How many numbers the model holds."""
        return sum(s.size for s in self.abstract.values())


def _kind(variable: Any) -> str:
    if isinstance(variable, nnx.Param):
        return "params"
    return "streams" if randomness.is_stream(variable) else "variables"


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


def _not_an_array(path: str, variable: Any, value: Any) -> Problem:
    return Problem(
        path=f"model ({path})",
        message=f"the model holds a {type(variable).__name__} that is not an array",
        got=type(value).__name__,
        expected="arrays in variables; other values as plain attributes",
    )


def _batch_dependence(model: Any, streams: Mapping[str, Any]) -> tuple[str, ...]:
    """The reasons for which microbatches compute something else than the whole batch, each with the path of its module."""
    keys = [path.rpartition(".")[0].removesuffix(".rngs") for path, spec in streams.items() if randomness.is_key(spec)]
    reasons = [f"{path} draws random numbers" for path in keys]
    for path, module in nnx.iter_modules(model):
        name = ".".join(map(str, path))
        declared = getattr(module, "batch_dependence", None)
        if isinstance(declared, str):
            reasons.append(f"{name} {declared}")
        elif any(isinstance(v, nnx.BatchStat) for v in vars(module).values()):
            reasons.append(f"{name} normalises over the batch")
    return tuple(dict.fromkeys(reasons))


def count_parameters(config: Node[Any]) -> int:
    """How many numbers a model of this config holds; builds it abstractly."""
    return Functional.of(config).num_parameters
