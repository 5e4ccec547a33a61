"""The training state."""

import dataclasses
from typing import Any

import jax

from axlearn_core.compose.functional import Params


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Training state of a run, a pytree. Its parts are flat dicts keyed by dotted path.

    Attributes:
        step: int32, number of completed steps.
        params: Parameters of the model (`nnx.Param`), which the learner updates.
        variables: Other variables of the model (`nnx.Variable`), such as the running mean of a BatchNorm.
        rng: uint32, data of the run's root key. It is constant, and the random numbers of a step are derived from it.
        learner: State of the learner, such as optimizer moments.
    """

    step: jax.Array
    params: Params
    variables: Params
    rng: jax.Array
    learner: Any

    def replace(self, **changes: object) -> "TrainState":
        """Return a copy with some parts replaced."""
        return dataclasses.replace(self, **changes)


# This order matches the dict that earlier versions used, so that programs do not change.
jax.tree_util.register_dataclass(TrainState, ["learner", "params", "rng", "step", "variables"], [])
