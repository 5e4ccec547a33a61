"""The training state."""

import dataclasses
from typing import Any

import jax

from axlearn_core.compose.functional import Params


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a run carries from step to step. A pytree; each part is flat, by the dotted path of its arrays.

    Attributes:
        step: int32, how many steps were taken.
        params: what the learner changes: the model's `nnx.Param`s.
        variables: every other `nnx.Variable` of the model, such as the running mean of a BatchNorm.
        rng: uint32, the data of the run's root key. It never changes: the random numbers of a step are derived from it.
        learner: the state of the learner, such as the moments of an optimizer.
    """

    step: jax.Array
    params: Params
    variables: Params
    rng: jax.Array
    learner: Any

    def replace(self, **changes: object) -> "TrainState":
        """A copy with other parts."""
        return dataclasses.replace(self, **changes)


# Flattened in this order, which is that of the dict that older versions had: their programs stay the same.
jax.tree_util.register_dataclass(TrainState, ["learner", "params", "rng", "step", "variables"], [])
