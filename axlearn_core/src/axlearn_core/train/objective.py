"""An objective that is the model's own loss, and the initial weights of frozen models."""

from collections.abc import Mapping
from typing import Any

import attrs
import jax
from flax import nnx

from axlearn_core.compose import Program
from axlearn_core.config import Configurable, node
from axlearn_core.contracts.parts import Batch, Weights
from axlearn_core.errors import CheckpointError
from axlearn_core.run import open_weights


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
class FrozenWeights:
    """External weights for an objective's frozen models.

    Attributes:
        program: Program of the run.
        sources: Weights opened for each frozen model, by path.
    """

    program: Program
    sources: Mapping[str, Weights]

    @classmethod
    def open(cls, program: Program) -> "FrozenWeights":
        """Open the weights that the objective names, without reading tensors.

        Raises:
            CheckpointError: There are no weights, or they belong to a different model.
        """
        sources = {}
        for path, frozen in program.trained.frozen.items():
            if frozen.weights is not None:
                sources[path] = open_weights(frozen.weights)
                _check_specs(path, frozen, sources[path].specs())
        return cls(program, sources)

    def load(self, state: Any) -> Any:
        """Return the training state with these weights, in the dtypes and shardings of the program."""
        variables = dict(state.variables)
        for path, weights in self.sources.items():
            like = self.program.state.variables
            tensors = weights.read("**", {p: like[f"{path}.{p}"].sharding for p in weights.specs()})
            variables |= {f"{path}.{p}": x.astype(like[f"{path}.{p}"].dtype) for p, x in tensors.items()}
        return state.replace(variables=variables)


def _check_specs(path: str, frozen: Any, specs: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    expected = {**frozen.functional.abstract, **frozen.functional.variables}
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
            f"{frozen.weights} does not have the weights of {path}\n{listed}\n    fix: give {path} the config of that model"
        )
