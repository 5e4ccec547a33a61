"""A model and its training objective as pure functions.

Arrays of the model keep their paths. Arrays of the objective have the prefix `objective.`.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from axlearn_core.compose.functional import Axes, Functional, ModelWeights, Params
from axlearn_core.config import Node
from axlearn_core.contracts.experiment import get_objective_config
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.decisions import Decision

PREFIX = "objective."


class Frozen(nnx.Variable[Any]):
    """An array that training does not change. It has no gradient and no optimizer state."""


class FrozenModel(nnx.Module):
    """A frozen model inside an objective, such as a reference model or a teacher.

    Attributes:
        weights: Path or URI of its weights, which `open_weights` reads. None uses the weights that training starts with.
        functional: The model as pure functions.
    """

    def __init__(self, config: Node[Any], *, rngs: nnx.Rngs, weights: str | None = None):
        self.weights, self.functional = weights, Functional.from_config(config)
        params, variables = self.functional.init_arrays(rngs.params())
        axes = {**self.functional.axes, **self.functional.variable_axes}
        for path, value in (params | variables).items():
            setattr(self, path, Frozen(value, out_sharding=axes[path], eager_sharding=False))

    def bind(self) -> Any:
        """Return the model in evaluation mode, without gradients. Traceable, with no runtime cost."""
        params, variables = (
            {path: lax.stop_gradient(getattr(self, path).get_value()) for path in specs}
            for specs in (self.functional.abstract, self.functional.variables)
        )
        return self.functional.bind(params, variables)


class TrainedModel(nnx.Module):
    """A model inside an objective that is trained with it, such as a critic.

    Attributes:
        model: The model. Its parameters belong to those of the objective.
        weights: Path or URI of its initial weights, which `open_weights` reads. None uses the weights that training starts with.
        functional: The model as pure functions.
    """

    def __init__(self, config: Node[Any], *, rngs: nnx.Rngs, weights: str | None = None):
        self.weights, self.functional = weights, Functional.from_config(config)
        self.model = config.build(rngs=rngs)


@attrs.frozen(eq=False)
class ModelAndObjective:
    """A model and its objective.

    Attributes:
        model: The model.
        objective: The objective, or None to train with the model's own loss.
    """

    model: Functional
    objective: Functional | None = None

    @classmethod
    def from_config(cls, config: Any, model: Functional | None = None) -> "ModelAndObjective":
        """Build the model and the objective of an experiment abstractly.

        Args:
            config: Experiment with a `model` and optionally an `objective`.
            model: The functional of `config.model`, if it is already built.

        Raises:
            ConfigError: If the objective is not a module, or if one of its models cannot start with the model's weights.
        """
        model = Functional.from_config(config.model) if model is None else model
        node = get_objective_config(config)
        if node is None:
            return cls(model)
        if clashes := [path for path in (*model.abstract, *model.variables) if path.startswith(PREFIX)]:
            raise ConfigError(
                Problem(
                    path=f"model ({clashes[0]})",
                    message="the name `objective` at the root of a model is reserved for the arrays of the objective",
                    fix="rename the model's attribute, or train without an objective",
                )
            )
        owner = type(node).owner
        if isinstance(owner, type) and not issubclass(owner, nnx.Module):
            raise ConfigError(
                Problem(
                    path="objective",
                    message="an objective must be an nnx.Module",
                    got=owner.__qualname__,
                    fix="derive its class from (Configurable, nnx.Module)",
                )
            )
        both = cls(model, Functional.from_config(node, model=config.model))
        both._check_copies()
        return both

    @cached_property
    def abstract(self) -> Params:
        """`jax.ShapeDtypeStruct` of each parameter by path."""
        return self._union("abstract")

    @cached_property
    def axes(self) -> Axes:
        """Logical axis names of each parameter by path."""
        return self._union("axes")

    @cached_property
    def variables(self) -> Params:
        """`jax.ShapeDtypeStruct` of each variable by path."""
        return self._union("variables")

    @cached_property
    def variable_axes(self) -> Axes:
        """Logical axis names of each variable by path."""
        return self._union("variable_axes")

    @property
    def unnamed(self) -> tuple[str, ...]:
        """Paths of parameters without axis names."""
        paths = () if self.objective is None else tuple(PREFIX + path for path in self.objective.unnamed)
        return (*self.model.unnamed, *paths)

    @property
    def learned(self) -> tuple[str, ...]:
        """Paths of variables that training updates without gradients."""
        paths = () if self.objective is None else tuple(PREFIX + path for path in self.objective.learned)
        return (*self.model.learned, *paths)

    @property
    def specs(self) -> ModelWeights:
        """Abstract weights of the model and the objective."""
        return ModelWeights(self.abstract, self.variables)

    @property
    def is_stateful(self) -> bool:
        """True if a step needs a random key or changes variables."""
        model = self.model
        return bool(self.objective is not None or model.streams or model.variables or model.totals)

    @property
    def batch_dependence(self) -> tuple[str, ...]:
        """Reasons why the loss for a row depends on the other rows of the batch. Empty if rows are independent."""
        reasons = self.objective.batch_dependence if self.objective is not None else ()
        return (*self.model.batch_dependence, *(f"objective: {reason.strip()}" for reason in reasons))

    @cached_property
    def frozen(self) -> dict[str, FrozenModel]:
        """The objective's frozen models by path, such as `objective.reference`."""
        return {path: module for path, module in self._modules.items() if isinstance(module, FrozenModel)}

    @cached_property
    def initialized(self) -> dict[str, FrozenModel | TrainedModel]:
        """The objective's models that start from existing weights, by the path of their arrays."""
        return {
            f"{path}.model" if isinstance(module, TrainedModel) else path: module
            for path, module in self._modules.items()
        }

    @cached_property
    def _modules(self) -> dict[str, FrozenModel | TrainedModel]:
        if self.objective is None:
            return {}
        modules = nnx.iter_modules(self.objective.describe())
        kinds = (FrozenModel, TrainedModel)
        return {PREFIX + ".".join(map(str, path)): m for path, m in modules if isinstance(m, kinds)}

    def init_objective(self, key: jax.Array, weights: ModelWeights) -> ModelWeights:
        """Add the initial weights of the objective to the weights of the model. Traceable."""
        if self.objective is None:
            return weights
        params, variables = self.objective.init_arrays(jax.random.fold_in(key, 1))
        params, variables = _with_prefix(params), _with_prefix(variables)
        source = {**weights.params, **weights.variables}
        for path in self.copies:
            part = params if path in params else variables
            # Copy: two arrays that share a buffer cannot be donated together.
            part[path] = jnp.array(source[_path_in_model(path, self.initialized)], part[path].dtype, copy=True)
        return ModelWeights({**weights.params, **params}, {**weights.variables, **variables})

    @cached_property
    def fixed(self) -> tuple[str, ...]:
        """Paths of arrays that belong to frozen models."""
        return tuple(
            f"{prefix}.{path}"
            for prefix, model in self.frozen.items()
            for path in (*model.functional.abstract, *model.functional.variables)
        )

    @cached_property
    def copies(self) -> tuple[str, ...]:
        """Paths of the objective's arrays that start as copies of the model's arrays."""
        return tuple(
            f"{prefix}.{path}"
            for prefix, model in self.initialized.items()
            if model.weights is None
            for path in (*model.functional.abstract, *model.functional.variables)
        )

    def select_model_weights(self, weights: ModelWeights) -> ModelWeights:
        """Select the model's weights from the combined weights of the model and its objective."""
        if self.objective is None:
            return weights
        return ModelWeights(
            {p: weights.params[p] for p in self.model.abstract}, {p: weights.variables[p] for p in self.model.variables}
        )

    def bind_objective(self, params: Params, variables: Params, key: jax.Array | None = None) -> Any:
        """Return the objective with its arrays; see `Functional.bind`."""
        assert self.objective is not None
        return self.objective.bind(_without_prefix(params), _without_prefix(variables), key)

    def extract_variables(self, model: object, objective: object = None) -> Params:
        """Return the variables of the model and the objective after their calls."""
        added = {} if self.objective is None else _with_prefix(self.objective.extract_variables(objective))
        return {**self.model.extract_variables(model), **added}

    def begin_step(self, variables: Params) -> Params:
        """See `Functional.begin_step`."""
        if self.objective is None:
            return self.model.begin_step(variables)
        added = self.objective.begin_step(_without_prefix(variables))
        return {**self.model.begin_step({p: variables[p] for p in self.model.variables}), **_with_prefix(added)}

    def end_step(self, params: Params, variables: Params) -> Params:
        """See `Functional.end_step`."""
        if self.objective is None:
            return self.model.end_step(params, variables)
        added = self.objective.end_step(_without_prefix(params), _without_prefix(variables))
        return {**self.model.end_step(params, variables), **_with_prefix(added)}

    def _union(self, name: str) -> dict[str, Any]:
        added = {} if self.objective is None else _with_prefix(getattr(self.objective, name))
        return {**getattr(self.model, name), **added}

    def _check_copies(self) -> None:
        specs = {**self.model.abstract, **self.model.variables}
        for prefix, module in self.initialized.items():
            if module.weights is not None:
                continue
            expected = {**module.functional.abstract, **module.functional.variables}
            wrong = [p for p, spec in expected.items() if p not in specs or specs[p].shape != spec.shape]
            if wrong:
                more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
                raise ConfigError(
                    Problem(
                        path=prefix,
                        message="cannot start with the weights of the trained model, which is a different model",
                        got=f"different arrays: {', '.join(wrong[:3])}{more}",
                        fix="set its weights, or remove its model",
                    )
                )


def decide_replication(trained: Functional | ModelAndObjective) -> tuple[Decision, ...]:
    """Return the decision to replicate parameters without axis names, or an empty tuple if all have names."""
    if not trained.unnamed:
        return ()
    modules = list(dict.fromkeys(path.rpartition(".")[0] or path for path in trained.unnamed))
    size = sum(trained.abstract[p].size * trained.abstract[p].dtype.itemsize for p in trained.unnamed)
    more = f" and {len(modules) - 3} more" if len(modules) > 3 else ""
    return (
        Decision(
            "replicated",
            f"{', '.join(modules[:3])}{more}",
            f"{len(trained.unnamed)} parameters, {size / 2**20:.3g} MiB, have no axis names and are replicated",
        ),
    )


def _path_in_model(path: str, prefixes: Iterable[str]) -> str:
    prefix = next(prefix for prefix in prefixes if path.startswith(f"{prefix}."))
    return path.removeprefix(f"{prefix}.")


def _with_prefix(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {PREFIX + path: x for path, x in arrays.items()}


def _without_prefix(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {path.removeprefix(PREFIX): x for path, x in arrays.items() if path.startswith(PREFIX)}
