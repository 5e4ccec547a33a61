"""An objective that is the model's own loss, and the initial weights of the models in an objective."""

from collections.abc import Mapping
from typing import Any

import attrs
import jax
from flax import nnx

from axlearn_core.compose import Program, TrainedModel
from axlearn_core.config import Configurable, node
from axlearn_core.contracts.parts import Batch, Weights
from axlearn_core.errors import CheckpointError
from axlearn_core.run import open_weights
from axlearn_core.run.weights import RunWeights


class ModelLoss(Configurable, nnx.Module):
    """The model's own loss. Objectives that add terms to it wrap this objective."""

    @node
    class Config(Configurable.Config["ModelLoss"]):
        """No settings."""

    def __init__(self, cfg: Config):
        pass

    def loss(self, model: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """See `axlearn_core.contracts.parts.Objective`."""
        return model.loss(batch)


@attrs.frozen(eq=False)
class ObjectiveWeights:
    """External weights for the models in an objective.

    If the weights of a `TrainedModel` are those of a run, the parameters next to the model, such as the weight of its head, start
    from the parameters with the same names in the objective of that run.

    Attributes:
        program: Program of the run.
        sources: Weights opened for each model, by the path of its arrays.
    """

    program: Program
    sources: Mapping[str, Weights]

    @classmethod
    def open(cls, program: Program) -> "ObjectiveWeights":
        """Open the weights that the objective names, without reading tensors.

        Raises:
            CheckpointError: There are no weights, or they belong to a different model.
        """
        sources = {}
        for path, module in program.trained.initialized.items():
            if module.weights is not None:
                sources[path] = open_weights(module.weights)
                _check_specs(path, module, sources[path].specs())
        return cls(program, sources)

    def load(self, state: Any) -> Any:
        """Return the training state with these weights, in the dtypes and shardings of the program."""
        params, variables = dict(state.params), dict(state.variables)
        specs = {**self.program.state.params, **self.program.state.variables}
        for path, weights in self.sources.items():
            tensors = weights.read("**", {p: specs[f"{path}.{p}"].sharding for p in weights.specs()})
            arrays = {f"{path}.{p}": x for p, x in tensors.items()}
            if isinstance(self.program.trained.initialized[path], TrainedModel) and isinstance(weights, RunWeights):
                arrays |= _read_neighbors(path, weights, params)
            for name, x in arrays.items():
                part = params if name in params else variables
                part[name] = x.astype(specs[name].dtype)
        return state.replace(params=params, variables=variables)


def _read_neighbors(path: str, weights: RunWeights, params: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Read the parameters next to a trained model that the objective of a run has too, by path."""
    prefix = path.rpartition(".")[0]
    stored = {f"{prefix}.{p}": x for p, x in weights.read_objective().items()}
    same = {
        p: x for p, x in stored.items() if p in params and not p.startswith(f"{path}.") and x.shape == params[p].shape
    }
    return {p: jax.device_put(x, params[p].sharding) for p, x in same.items()}


def _check_specs(path: str, module: Any, specs: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    expected = {**module.functional.abstract, **module.functional.variables}
    problems = [f"missing: {p}" for p in expected if p not in specs]
    problems += [f"not in this model: {p}" for p in specs if p not in expected]
    problems += [
        f"differs: {p}: got {specs[p].shape}, expected {x.shape}"
        for p, x in expected.items()
        if p in specs and specs[p].shape != x.shape
    ]
    if problems:
        more = [f"and {len(problems) - 12} more"] if len(problems) > 12 else []
        listed = "\n".join(f"    {p}" for p in [*problems[:12], *more])
        raise CheckpointError(
            f"{module.weights} does not have the weights of {path}\n{listed}\n    fix: give {path} the config of that model"
        )
