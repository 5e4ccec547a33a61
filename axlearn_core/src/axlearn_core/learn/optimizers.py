"""Optimizers: optax optimizers as nodes. Use `configure` for other optax functions.

The learner offers these arguments to an optimizer:

max_steps            number of updates in the run, for schedules
mask                 function from params to a tree of bools, True for parameters with weight decay (also offered under
                     optax's other name, `weight_decay_mask`)
axes                 logical axis names of each parameter by path, or None if unknown

If an optimizer evaluates with parameters other than the ones it trains (schedule-free), its node also has an
`evaluation_params(state, params) -> params` method; see `EvaluatesWith`.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import optax

from axlearn_core.config import Node, node, setting
from axlearn_core.learn.schedules import Cosine, Schedule

Axes = Mapping[str, tuple[str | None, ...] | None]
LearningRate = float | Node[Schedule]


Optimizer = optax.GradientTransformation
"""Optax transformation that includes the learning rate and its sign: its updates are added to the parameters."""


@runtime_checkable
class EvaluatesWith(Protocol):
    """Node of an optimizer that evaluates with parameters other than the ones it trains."""

    def evaluation_params(self, state: Any, params: Any) -> Any:
        """Return the parameters for evaluation and export. Pure and traceable.

        Args:
            state: State of the transformation that `build` returns.
            params: Trained parameters keyed by path.
        """
        ...


def convert_learning_rate(learning_rate: LearningRate, max_steps: int) -> Any:
    """Convert a learning rate for optax: a number, or a function of the update's index."""
    return learning_rate.build(max_steps=max_steps) if isinstance(learning_rate, Node) else learning_rate


@node
class AdamW(Node[Optimizer]):
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019). Uses `optax.adamw`."""

    learning_rate: float | Node[Schedule] = setting(default=Cosine(), ge=0)
    b1: float = setting(default=0.9, ge=0, lt=1)
    b2: float = setting(default=0.95, ge=0, lt=1)
    eps: float = setting(default=1e-8, gt=0)
    weight_decay: float = setting(default=0.1, ge=0)
    nesterov: bool = False

    def build(self, *, max_steps: int, mask: Any = None, **_: object) -> Optimizer:
        """Return the transformation for a run of `max_steps` updates."""
        return optax.adamw(
            convert_learning_rate(self.learning_rate, max_steps),
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            mask=mask,
            nesterov=self.nesterov,
        )
