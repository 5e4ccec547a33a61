"""A model together with the objective that it is trained with: pure functions over one dict of arrays each.

What is under the model keeps its paths; the arrays of the objective are at `objective.<path in the objective>`.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from axlearn_core.compose.functional import Axes, Functional, ModelWeights, Params
from axlearn_core.config import Node
from axlearn_core.contracts.experiment import objective_of
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.decisions import Decision

PREFIX = "objective."


class Frozen(nnx.Variable[Any]):
    """An array that no training step changes: it has no gradient and no optimizer state."""


class FrozenModel(nnx.Module):
    """A model inside an objective that computes and never trains, such as a reference or a teacher.

    Attributes:
        weights: what it begins with: a path or URI for `open_weights`; None takes the weights that training begins with.
        functional: the model as pure functions.
    """

    def __init__(self, config: Node[Any], *, rngs: nnx.Rngs, weights: str | None = None):
        self.weights, self.functional = weights, Functional.of(config)
        params, variables = self.functional.init_arrays(rngs.params())
        axes = {**self.functional.axes, **self.functional.variable_axes}
        for path, value in (params | variables).items():
            setattr(self, path, Frozen(value, out_sharding=axes[path], eager_sharding=False))

    def bind(self) -> Any:
        """The model in evaluation, with arrays that pass no gradient. Traceable; costs nothing at run time."""
        params, variables = (
            {path: lax.stop_gradient(getattr(self, path).get_value()) for path in specs}
            for specs in (self.functional.abstract, self.functional.variables)
        )
        return self.functional.bind(params, variables)


@attrs.frozen(eq=False)
class ModelAndObjective:
    """What a training step computes with.

    Attributes:
        model: the model.
        objective: the objective; None trains by the model's own loss.
    """

    model: Functional
    objective: Functional | None = None

    @classmethod
    def of(cls, config: Any, model: Functional | None = None) -> "ModelAndObjective":
        """Those of a root config, built abstractly.

        Args:
            config: has `model`, and may have `objective`.
            model: of `config.model`, where it was built already.

        Raises:
            ConfigError: the objective is not a module, or a frozen model in it cannot begin as the model does.
        """
        model = Functional.of(config.model) if model is None else model
        node = objective_of(config)
        if node is None:
            return cls(model)
        if clashes := [path for path in (*model.abstract, *model.variables) if path.startswith(PREFIX)]:
            raise ConfigError(
                Problem(
                    path=f"model ({clashes[0]})",
                    message="the name `objective` at the root of a model is for the objective's own arrays",
                    fix="rename that attribute of the model, or train it by its own loss",
                )
            )
        owner = type(node).owner
        if isinstance(owner, type) and not issubclass(owner, nnx.Module):
            raise ConfigError(
                Problem(
                    path="objective",
                    message="an objective is an nnx.Module",
                    got=owner.__qualname__,
                    fix="derive its class from (Configurable, nnx.Module)",
                )
            )
        both = cls(model, Functional.of(node, model=config.model))
        both._check_copies()
        return both

    @cached_property
    def abstract(self) -> Params:
        """Path -> `jax.ShapeDtypeStruct` of each parameter."""
        return self._union("abstract")

    @cached_property
    def axes(self) -> Axes:
        """Path -> logical axis names of each parameter."""
        return self._union("axes")

    @cached_property
    def variables(self) -> Params:
        """Path -> `jax.ShapeDtypeStruct` of each other variable."""
        return self._union("variables")

    @cached_property
    def variable_axes(self) -> Axes:
        """As `axes`, of the variables."""
        return self._union("variable_axes")

    @property
    def unnamed(self) -> tuple[str, ...]:
        """The paths of parameters without axis names."""
        own = () if self.objective is None else tuple(PREFIX + path for path in self.objective.unnamed)
        return (*self.model.unnamed, *own)

    @property
    def learned(self) -> tuple[str, ...]:
        """The paths of variables that training changes by rules of their own."""
        own = () if self.objective is None else tuple(PREFIX + path for path in self.objective.learned)
        return (*self.model.learned, *own)

    @property
    def specs(self) -> ModelWeights:
        """The abstract weights of both."""
        return ModelWeights(self.abstract, self.variables)

    @property
    def is_stateful(self) -> bool:
        """Whether a step needs a random key, or changes variables."""
        model = self.model
        return bool(self.objective is not None or model.streams or model.variables or model.totals)

    @property
    def batch_dependence(self) -> tuple[str, ...]:
        """Why a loss depends on which rows are computed together; empty where it does not."""
        own = self.objective.batch_dependence if self.objective is not None else ()
        return (*self.model.batch_dependence, *(f"objective: {reason.strip()}" for reason in own))

    @cached_property
    def frozen(self) -> dict[str, FrozenModel]:
        """Path (`objective.reference`) -> each frozen model of the objective."""
        if self.objective is None:
            return {}
        modules = nnx.iter_modules(self.objective.describe())
        return {PREFIX + ".".join(map(str, path)): m for path, m in modules if isinstance(m, FrozenModel)}

    def init_objective(self, key: jax.Array, weights: ModelWeights) -> ModelWeights:
        """The weights of both, for a run that begins with these weights of the model. Traceable."""
        if self.objective is None:
            return weights
        params, variables = self.objective.init_arrays(jax.random.fold_in(key, 1))
        params, variables = _with_prefix(params), _with_prefix(variables)
        source = {**weights.params, **weights.variables}
        for path in self.copies:
            # A copy, because two arrays that share a buffer could not be donated together.
            variables[path] = jnp.array(source[_path_in_model(path, self.frozen)], variables[path].dtype, copy=True)
        return ModelWeights({**weights.params, **params}, {**weights.variables, **variables})

    @cached_property
    def fixed(self) -> tuple[str, ...]:
        """The paths of the frozen models' arrays."""
        return tuple(
            f"{at}.{path}"
            for at, model in self.frozen.items()
            for path in (*model.functional.abstract, *model.functional.variables)
        )

    @cached_property
    def copies(self) -> tuple[str, ...]:
        """The paths of the objective that begin as arrays of the model."""
        return tuple(
            f"{at}.{path}"
            for at, model in self.frozen.items()
            if model.weights is None
            for path in (*model.functional.abstract, *model.functional.variables)
        )

    def of_model(self, weights: ModelWeights) -> ModelWeights:
        """The model's part of the weights of both."""
        if self.objective is None:
            return weights
        return ModelWeights(
            {p: weights.params[p] for p in self.model.abstract}, {p: weights.variables[p] for p in self.model.variables}
        )

    def bind_objective(self, params: Params, variables: Params, key: jax.Array | None = None) -> Any:
        """The objective with its arrays among these; see `Functional.bind`."""
        assert self.objective is not None
        return self.objective.bind(_without_prefix(params), _without_prefix(variables), key)

    def variables_of(self, model: object, objective: object = None) -> Params:
        """The variables of both after their calls."""
        own = {} if self.objective is None else _with_prefix(self.objective.variables_of(objective))
        return {**self.model.variables_of(model), **own}

    def begin_step(self, variables: Params) -> Params:
        """See `Functional.begin_step`."""
        if self.objective is None:
            return self.model.begin_step(variables)
        own = self.objective.begin_step(_without_prefix(variables))
        return {**self.model.begin_step({p: variables[p] for p in self.model.variables}), **_with_prefix(own)}

    def end_step(self, params: Params, variables: Params) -> Params:
        """See `Functional.end_step`."""
        if self.objective is None:
            return self.model.end_step(params, variables)
        own = self.objective.end_step(_without_prefix(params), _without_prefix(variables))
        return {**self.model.end_step(params, variables), **_with_prefix(own)}

    def _union(self, name: str) -> dict[str, Any]:
        own = {} if self.objective is None else _with_prefix(getattr(self.objective, name))
        return {**getattr(self.model, name), **own}

    def _check_copies(self) -> None:
        specs = {**self.model.abstract, **self.model.variables}
        for at, frozen in self.frozen.items():
            if frozen.weights is not None:
                continue
            expected = {**frozen.functional.abstract, **frozen.functional.variables}
            wrong = [p for p, spec in expected.items() if p not in specs or specs[p].shape != spec.shape]
            if wrong:
                more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
                raise ConfigError(
                    Problem(
                        path=at,
                        message="cannot begin with the weights of the trained model: it is another model",
                        got=f"not the same: {', '.join(wrong[:3])}{more}",
                        fix="name the weights that it begins with, or leave its model out",
                    )
                )


def replicated(trained: Functional | ModelAndObjective) -> tuple[Decision, ...]:
    """The decision to hold parameters without axis names whole on every device; empty where all have names."""
    if not trained.unnamed:
        return ()
    modules = list(dict.fromkeys(path.rpartition(".")[0] or path for path in trained.unnamed))
    size = sum(trained.abstract[p].size * trained.abstract[p].dtype.itemsize for p in trained.unnamed)
    more = f" and {len(modules) - 3} more" if len(modules) > 3 else ""
    return (
        Decision(
            "replicated",
            f"{', '.join(modules[:3])}{more}",
            f"{len(trained.unnamed)} parameters, {size / 2**20:.3g} MiB, have no axis names: each device holds them whole",
        ),
    )


def _path_in_model(path: str, frozen: Mapping[str, FrozenModel]) -> str:
    at = next(at for at in frozen if path.startswith(f"{at}."))
    return path.removeprefix(f"{at}.")


def _with_prefix(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {PREFIX + path: x for path, x in arrays.items()}


def _without_prefix(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {path.removeprefix(PREFIX): x for path, x in arrays.items() if path.startswith(PREFIX)}
