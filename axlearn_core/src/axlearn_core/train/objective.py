"""The objective of a run: the model's own loss as one, and the weights that frozen models begin with."""

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
    """The loss of the model itself: what an objective that adds something to it begins with."""

    @node
    class Config(Configurable.Config["ModelLoss"]):
        """Nothing to set."""

    def __init__(self, cfg: Config):
        pass

    def loss(self, model: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """See `axlearn_core.contracts.parts.Objective`."""
        return model.loss(batch)


@attrs.frozen(eq=False)
class FrozenWeights:
    """The weights that the frozen models of an objective begin with, where they come from elsewhere."""

    program: Program
    sources: Mapping[str, Weights]

    @classmethod
    def of(cls, program: Program) -> "FrozenWeights":
        """Opens what the objective names; reads no tensor.

        Raises:
            CheckpointError: no weights there, or it is of another model.
        """
        sources = {}
        for at, frozen in program.trained.frozen.items():
            if frozen.weights is not None:
                sources[at] = open_weights(frozen.weights)
                _check_specs(at, frozen, sources[at].specs())
        return cls(program, sources)

    def load(self, state: Any) -> Any:
        """A training state with these weights, in the dtypes and shardings of the program."""
        variables = dict(state.variables)
        for at, weights in self.sources.items():
            like = self.program.state.variables
            tensors = weights.read("**", {p: like[f"{at}.{p}"].sharding for p in weights.specs()})
            variables |= {f"{at}.{p}": x.astype(like[f"{at}.{p}"].dtype) for p, x in tensors.items()}
        return state.replace(variables=variables)


def _check_specs(at: str, frozen: Any, specs: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    expected = {**frozen.functional.abstract, **frozen.functional.variables}
    problems = [f"missing: {p}" for p in expected if p not in specs]
    problems += [f"not in this model: {p}" for p in specs if p not in expected]
    problems += [
        f"differs: {p}: {specs[p].shape} there, {x.shape} here"
        for p, x in expected.items()
        if p in specs and specs[p].shape != x.shape
    ]
    if problems:
        more = [f"and {len(problems) - 12} more"] if len(problems) > 12 else []
        listed = "\n".join(f"    {p}" for p in [*problems[:12], *more])
        raise CheckpointError(
            f"{frozen.weights} does not have the weights of {at}\n{listed}\n    fix: give {at} the config of that model"
        )
