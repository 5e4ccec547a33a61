"""Represent a model as pure functions over flat dicts of arrays: `{"decoder.layer.attention.query.weight": array}`.

The keys are module paths. Path patterns, checkpoints, and the tables that map names from other libraries all use them. There
are four kinds of `nnx.Variable`: parameters (`nnx.Param`), random streams (`nnx.RngState`, see `nn.randomness`), step totals
(`nn.variables.StepTotal`), and all others, which are called the model's variables.
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
from axlearn_core.nn import module_checks, randomness
from axlearn_core.nn.axis_names import declared_names, is_unnamed
from axlearn_core.nn.layer import shapes_only
from axlearn_core.nn.variables import LearnedVariable, StepTotal
from axlearn_core.plugins.backends import prepare_backends

Params = dict[str, Any]
Axes = dict[str, tuple[str | None, ...]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelWeights:
    """Parameters and variables of a model by path."""

    params: Params
    variables: Params


@attrs.frozen(eq=False, repr=False)
class Functional:
    """A model, split into its structure and its arrays.

    Attributes:
        abstract: `jax.ShapeDtypeStruct` of each parameter by path.
        axes: Logical axis name (or None) for each dimension of each parameter, by path.
        variables: `jax.ShapeDtypeStruct` of each variable by path.
        variable_axes: Logical axis names of the variables, like `axes`.
        learned: Paths of the variables that are `LearnedVariable`s.
        totals: `jax.ShapeDtypeStruct` of each `StepTotal` by path.
        streams: `jax.ShapeDtypeStruct` of each part of a random stream by path. Empty if the model draws no random numbers.
        batch_dependence: Reasons why the result for a row depends on the other rows of the batch. Empty if rows are independent.
        unnamed: Paths of parameters without axis names, which are replicated.
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
    def from_config(cls, config: Node[Any], **offered: object) -> "Functional":
        """Build the model abstractly, without allocating arrays.

        Args:
            config: Config of the model.
            offered: Arguments for the config's `build`, in addition to `rngs`.

        Raises:
            ConfigError: If a module has arrays outside variables, or belongs to a library other than flax.nnx.
        """

        prepare_backends()

        def build(key: jax.Array) -> Any:
            # Parameters have a separate stream, so their values do not depend on the other random numbers that modules draw.
            rngs = nnx.Rngs(params=key, default=jax.random.fold_in(key, 1))
            with nnx.use_eager_sharding(False):  # axis names are logical, so the program, not flax, does the sharding
                return module_checks.check_part(config.build(rngs=rngs, **offered), config)

        try:
            with shapes_only():
                model = nnx.eval_shape(lambda: build(jax.random.key(0)))
        except module_checks.UnfitPart as error:
            raise module_checks.add_config_path(error, config) from None
        except ValueError as error:
            refused = module_checks.convert_flax_error(error, config)
            if refused is None:
                raise
            raise refused from error
        return cls._split(model, build)

    @classmethod
    def from_module(cls, model: object) -> "Functional":
        """Split a model that is already built. The result cannot be initialized again."""
        graph, state = nnx.split(model)
        return cls._split(nnx.eval_shape(lambda: nnx.merge(graph, state)), None)

    @classmethod
    def _split(cls, model: Any, build: Callable[[jax.Array], Any] | None) -> "Functional":
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
        module_checks.check_seeds(model, draws=bool(arrays["streams"]))
        reasons = _batch_dependence(model, arrays["streams"])
        model.eval()
        inference, _ = nnx.split(model)
        return cls(
            arrays["params"], axes["params"], arrays["variables"], axes["variables"], tuple(learned),
            arrays["totals"], arrays["streams"], reasons, tuple(unnamed), build, training, inference, template,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"Functional({self.num_parameters:,} parameters in {len(self.abstract)} arrays)"

    @property
    def specs(self) -> ModelWeights:
        """Abstract weights."""
        return ModelWeights(self.abstract, self.variables)

    def init(self, key: jax.Array) -> Params:
        """Initialize the parameters. Traceable."""
        return self.init_arrays(key)[0]

    def init_arrays(self, key: jax.Array) -> tuple[Params, Params]:
        """Initialize the parameters and the variables. Traceable.

        Raises:
            ConfigError: If an initializer returns the wrong shape or dtype.
        """
        assert self._build is not None, "cannot initialize a model that is already built"
        _, state = nnx.split(self._build(key))
        flat = [(".".join(map(str, k)), v) for k, v in nnx.to_flat_state(state)]
        params = {path: v.get_value() for path, v in flat if path in self.abstract}
        if problems := [
            Problem(
                path=f"model ({path})",
                message="the initializer returns the wrong shape or dtype",
                got=f"{params[path].dtype} {params[path].shape}",
                expected=f"{spec.dtype} {spec.shape}",
            )
            for path, spec in self.abstract.items()
            if (params[path].shape, params[path].dtype) != (spec.shape, spec.dtype)
        ]:
            raise ConfigError(problems)
        return params, {path: v.get_value() for path, v in flat if path in self.variables}

    def bind(self, params: Params, variables: Params | None = None, key: jax.Array | None = None) -> Any:
        """Return the model with the given arrays. Traceable, with no runtime cost.

        Args:
            params: Parameters keyed by path.
            variables: Variables by path. Optional if the model has none. Missing step totals are zero.
            key: Random key for this call. If None, the model is in evaluation mode: it draws no random numbers and only
                reads its variables (flax's `deterministic` and `use_running_average`).

        Raises:
            RequestError: If variables of the model are missing.
        """
        arrays = variables or {}
        if missing := [path for path in self.variables if path not in arrays]:
            close = nearest(missing[0], arrays, limit=1)
            raise RequestError(
                f"variables of the model are missing: {', '.join(missing[:3])}"
                + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
                + (f"\n    nearest: {close[0]}" if close else "")
                + "\n    fix: bind(params, variables) with the variables of the same state or checkpoint"
            )

        def value(path: str) -> Any:
            if path in self.abstract:
                return params[path]
            if path in self.totals:
                return arrays[path] if path in arrays else jnp.zeros(self.totals[path].shape, self.totals[path].dtype)
            return arrays[path] if path in self.variables else randomness.derive(self.streams[path], path, key)

        values = [(k, v.replace(value(".".join(map(str, k))))) for k, v in self._template]
        graph = self._inference if key is None else self._training
        return nnx.merge(graph, nnx.from_flat_state(values))

    def describe(self) -> Any:
        """Return the model with abstract arrays, for inspecting its modules."""
        return self.bind(self.abstract, {**self.variables, **self.totals})

    def extract_weights(self, model: object) -> ModelWeights:
        """Return the arrays of a model with this structure."""
        flat = {".".join(map(str, k)): v.get_value() for k, v in nnx.to_flat_state(nnx.state(model))}
        return ModelWeights({p: flat[p] for p in self.abstract}, {p: flat[p] for p in self.variables})

    def extract_variables(self, model: object) -> Params:
        """Return the variables and step totals of a bound model after a call.

        Raises:
            RequestError: If the call created a new variable.
        """
        if not self.variables and not self.totals:
            return {}
        flat = {".".join(map(str, k)): v for k, v in nnx.to_flat_state(nnx.state(model))}
        for path, variable in flat.items():
            is_declared = any(path in part for part in (self.variables, self.abstract, self.streams, self.totals))
            if not is_declared and not isinstance(variable, nnx.Intermediate):
                raise RequestError(
                    f"calling the model created the variable {path} ({type(variable).__name__})\n"
                    "    fix: create it in the module's constructor, so that it is part of the training state and checkpoints"
                )
        return {path: flat[path].get_value() for path in (*self.variables, *self.totals)}

    def begin_step(self, variables: Params) -> Params:
        """Add step totals of zero to the variables, for the first microbatch of a training step. Traceable."""
        return {**variables, **{path: jnp.zeros(spec.shape, spec.dtype) for path, spec in self.totals.items()}}

    def end_step(self, params: Params, variables: Params) -> Params:
        """Call `end_step` of each module after the last microbatch of a training step. Return the new variables.

        Arrays of stacked layers have a leading `layers` axis. Traceable.
        """
        model = self.bind(params, variables)
        modules: list[Any] = [module for _, module in nnx.iter_modules(model) if isinstance(module, EndsStep)]
        for module in modules:
            module.end_step()
        after = self.extract_variables(model) if modules else variables
        return {path: after[path] for path in self.variables}

    @property
    def num_parameters(self) -> int:
        """Number of parameters."""
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
            Problem(path=path, message="needs one logical axis per dimension", got=str(names), expected=f"{rank} names")
        )
    return names


def _not_an_array(path: str, variable: object, value: object) -> Problem:
    return Problem(
        path=f"model ({path})",
        message=f"the value of a {type(variable).__name__} is not an array",
        got=type(value).__name__,
        expected="an array; use plain attributes for other values",
    )


def _batch_dependence(model: Any, streams: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the reasons why results for microbatches differ from those for the whole batch, each with the path of a module."""
    keys = [path.rpartition(".")[0].removesuffix(".rngs") for path, spec in streams.items() if randomness.is_key(spec)]
    reasons = [f"{path} draws random numbers" for path in keys]
    for path, module in nnx.iter_modules(model):
        name = ".".join(map(str, path))
        if isinstance(module, DependsOnBatch) and module.batch_dependence:
            reasons.append(f"{name} {module.batch_dependence}")
        elif any(isinstance(v, nnx.BatchStat) for v in vars(module).values()):
            reasons.append(f"{name} normalizes over the batch")
    return tuple(dict.fromkeys(reasons))


def count_parameters(config: Node[Any]) -> int:
    """Return the number of parameters of a model. Builds the model abstractly."""
    return Functional.from_config(config).num_parameters
