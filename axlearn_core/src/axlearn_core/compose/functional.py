"""A model as pure functions over flat dicts of arrays: `{"decoder.layer.attention.query.weight": array}`.

The keys are the paths of the modules, so that path patterns, checkpoints and name tables of other libraries all speak of an
array by one name. Four kinds of `nnx.Variable` are told apart: parameters (`nnx.Param`), random streams (`nnx.RngState`, see
`nn.randomness`), totals of a step (`nn.variables.StepTotal`), and all others, which are called the model's variables.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import Node
from axlearn_core.contracts.arrays import is_array
from axlearn_core.contracts.capabilities import DependsOnBatch, EndsStep
from axlearn_core.errors import ConfigError, Problem, RequestError, nearest
from axlearn_core.nn import held, randomness
from axlearn_core.nn.axis_names import declared_names, is_unnamed
from axlearn_core.nn.variables import LearnedVariable, StepTotal

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
        variables: path -> `jax.ShapeDtypeStruct` of each variable that the model keeps from step to step.
        variable_axes: as `axes`, of the variables.
        learned: the paths of those that are `LearnedVariable`s.
        totals: path -> `jax.ShapeDtypeStruct` of each `StepTotal`.
        streams: path -> `jax.ShapeDtypeStruct` of each part of a random stream; empty where the model draws no numbers.
        batch_dependence: why the model depends on which rows are computed together; empty where it does not.
        unnamed: the paths of parameters without axis names, which every device holds whole.
    """

    abstract: Params
    axes: Axes
    variables: Params
    variable_axes: Axes
    learned: tuple[str, ...]
    totals: Params
    streams: Params
    batch_dependence: tuple[str, ...]
    unnamed: tuple[str, ...]
    _build: Callable[[jax.Array], Any] | None
    _training: Any
    _inference: Any
    _template: tuple[tuple[tuple[Any, ...], Any], ...]

    @classmethod
    def of(cls, config: Node[Any], **offered: object) -> "Functional":
        """Builds the model abstractly, which allocates nothing. `offered` goes to the config's `build` in addition to `rngs`.

        Raises:
            ConfigError: a part holds arrays outside of variables, or is a module of another library.
        """

        def build(key: jax.Array) -> Any:
            # Parameters have a stream of their own, so that a module that draws elsewhere does not change their values.
            rngs = nnx.Rngs(params=key, default=jax.random.fold_in(key, 1))
            with nnx.use_eager_sharding(False):  # axis names are logical: the program lays out, not flax
                return held.check_part(config.build(rngs=rngs, **offered), config)

        try:
            model = nnx.eval_shape(lambda: build(jax.random.key(0)))
        except held.UnfitPart as error:
            raise held.at_path(error, config) from None
        except ValueError as error:
            refused = held.refused_by_flax(error, config)
            if refused is None:
                raise
            raise refused from error
        return cls._of_module(model, build)

    @classmethod
    def of_module(cls, model: object) -> "Functional":
        """Of a model that was built already; it cannot be initialised anew."""
        graph, state = nnx.split(model)
        return cls._of_module(nnx.eval_shape(lambda: nnx.merge(graph, state)), None)

    @classmethod
    def _of_module(cls, model: Any, build: Callable[[jax.Array], Any] | None) -> "Functional":
        training, state = nnx.split(model)
        template = tuple(nnx.to_flat_state(state))
        arrays: dict[str, Params] = {"params": {}, "variables": {}, "totals": {}, "streams": {}}
        axes: dict[str, Axes] = {"params": {}, "variables": {}, "totals": {}}
        unnamed: list[str] = []
        learned: list[str] = []
        for key, variable in template:
            path, value = ".".join(map(str, key)), variable.get_value()
            if not is_array(value):
                raise ConfigError(_not_an_array(path, variable, value))
            kind = _kind(variable)
            arrays[kind][path] = jax.ShapeDtypeStruct(value.shape, value.dtype)
            if isinstance(variable, LearnedVariable):
                learned.append(path)
            if kind in axes:
                names = _axes(path, variable, len(value.shape))
                axes[kind][path] = (None,) * len(value.shape) if names is None else names
                if kind == "params" and is_unnamed(variable) and value.shape:
                    unnamed.append(path)
        held.check_seeds(model, draws=bool(arrays["streams"]))
        reasons = _batch_dependence(model, arrays["streams"])
        model.eval()
        inference, _ = nnx.split(model)
        return cls(
            arrays["params"], axes["params"], arrays["variables"], axes["variables"], tuple(learned),
            arrays["totals"], arrays["streams"], reasons, tuple(unnamed), build, training, inference, template,
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
            variables: path -> array; may be left out where the model has none. Totals of a step that are not among them
                are zero.
            key: what the random numbers of this call are derived from. Without one the model is in evaluation: it draws
                nothing and its variables are only read (`deterministic` and `use_running_average`, as flax calls it).

        Raises:
            RequestError: the model has variables and they are not given.
        """
        by_path = variables or {}
        if missing := [path for path in self.variables if path not in by_path]:
            close = nearest(missing[0], by_path, limit=1)
            raise RequestError(
                f"the model has variables that it was not given: {', '.join(missing[:3])}"
                + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
                + (f"\n    nearest there: {close[0]}" if close else "")
                + "\n    fix: bind(params, variables), with the variables of the same state or checkpoint"
            )

        def value(path: str) -> Any:
            if path in self.abstract:
                return params[path]
            if path in self.totals:
                return by_path[path] if path in by_path else jnp.zeros(self.totals[path].shape, self.totals[path].dtype)
            return by_path[path] if path in self.variables else randomness.derive(self.streams[path], path, key)

        values = [(k, v.replace(value(".".join(map(str, k))))) for k, v in self._template]
        graph = self._inference if key is None else self._training
        return nnx.merge(graph, nnx.from_flat_state(values))

    def describe(self) -> Any:
        """The model with abstract arrays: for what its modules say of themselves."""
        return self.bind(self.abstract, {**self.variables, **self.totals})

    def weights_of(self, model: object) -> ModelWeights:
        """The arrays of a model of this structure."""
        flat = {".".join(map(str, k)): v.get_value() for k, v in nnx.to_flat_state(nnx.state(model))}
        return ModelWeights({p: flat[p] for p in self.abstract}, {p: flat[p] for p in self.variables})

    def variables_of(self, model: object) -> Params:
        """The variables of a bound model after its call, and the totals of the step so far.

        Raises:
            RequestError: the call made a variable that the model did not have.
        """
        if not self.variables and not self.totals:
            return {}
        flat = {".".join(map(str, k)): v for k, v in nnx.to_flat_state(nnx.state(model))}
        for path, variable in flat.items():
            is_declared = any(path in part for part in (self.variables, self.abstract, self.streams, self.totals))
            if not is_declared and not isinstance(variable, nnx.Intermediate):
                raise RequestError(
                    f"the variable {path} ({type(variable).__name__}) appeared when the model was called\n"
                    "    fix: make it in the module's constructor, so that training state and checkpoints have a place for it"
                )
        return {path: flat[path].get_value() for path in (*self.variables, *self.totals)}

    def begin_step(self, variables: Params) -> Params:
        """The variables that the first microbatch of a training step gets: with the totals, at zero. Traceable."""
        return {**variables, **{path: jnp.zeros(spec.shape, spec.dtype) for path, spec in self.totals.items()}}

    def end_step(self, params: Params, variables: Params) -> Params:
        """The variables after a training step, of those after its last microbatch: calls `end_step` of each module.

        The arrays of layers in a stack have their leading axis `layers`. Traceable.
        """
        model = self.bind(params, variables)
        modules: list[Any] = [module for _, module in nnx.iter_modules(model) if isinstance(module, EndsStep)]
        for module in modules:
            module.end_step()
        after = self.variables_of(model) if modules else variables
        return {path: after[path] for path in self.variables}

    @property
    def num_parameters(self) -> int:
        """How many numbers the model holds."""
        return sum(s.size for s in self.abstract.values())


def _kind(variable: object) -> str:
    if isinstance(variable, nnx.Param):
        return "params"
    if isinstance(variable, StepTotal):
        return "totals"
    return "streams" if randomness.is_stream(variable) else "variables"


def _axes(path: str, variable: Any, rank: int) -> tuple[str | None, ...] | None:
    names = declared_names(variable)
    if names is not None and len(names) != rank:
        raise ConfigError(
            Problem(path=path, message="one logical axis per dimension", got=str(names), expected=f"{rank} names")
        )
    return names


def _not_an_array(path: str, variable: object, value: object) -> Problem:
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
        if isinstance(module, DependsOnBatch) and module.batch_dependence:
            reasons.append(f"{name} {module.batch_dependence}")
        elif any(isinstance(v, nnx.BatchStat) for v in vars(module).values()):
            reasons.append(f"{name} normalises over the batch")
    return tuple(dict.fromkeys(reasons))


def count_parameters(config: Node[Any]) -> int:
    """How many numbers a model of this config holds; builds it abstractly."""
    return Functional.of(config).num_parameters
