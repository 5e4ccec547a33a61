"""Optimizers: optax's, as nodes. Any other optax function stands in the same slot through `configure`.

An optimizer is offered, when it is built:

max_steps            the horizon of the run, for schedules
mask                 params -> tree of bools: whether a parameter is decayed (also under optax's other name for it,
                     `weight_decay_mask`)
axes                 path -> logical axis names of each parameter's dimensions, or None where they are not known

A node whose optimizer evaluates with other parameters than it trains (schedule-free) has a method
`evaluation_params(state, params) -> params` beside `build`; see `EvaluatesWith`.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import optax

from axlearn_core.config import Node, node, setting
from axlearn_core.learn.schedules import Cosine, Schedule

Axes = Mapping[str, tuple[str | None, ...] | None]
LearningRate = float | Node[Schedule]


Optimizer = optax.GradientTransformation
"""The learning rate and its sign are included: what it returns is added to the parameters."""


@runtime_checkable
class EvaluatesWith(Protocol):
    """An optimizer's node that says which parameters to evaluate with."""

    def evaluation_params(self, state: Any, params: Any) -> Any:
        """The parameters to evaluate and export with, of those that the optimizer updates. Pure and traceable.

        Args:
            state: of the transformation that `build` gives.
            params: path -> array, as they are trained.
        """
        ...


def rate_of(learning_rate: LearningRate, max_steps: int) -> Any:
    """A learning rate as optax takes it: a number, or a function of the update's index."""
    return learning_rate.build(max_steps=max_steps) if isinstance(learning_rate, Node) else learning_rate


@node
class AdamW(Node[Optimizer]):
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019), as `optax.adamw`."""

    learning_rate: float | Node[Schedule] = setting(default=Cosine(), ge=0)
    b1: float = setting(default=0.9, ge=0, lt=1)
    b2: float = setting(default=0.95, ge=0, lt=1)
    eps: float = setting(default=1e-8, gt=0)
    weight_decay: float = setting(default=0.1, ge=0)
    nesterov: bool = False

    def build(self, *, max_steps: int, mask: Any = None, **_: object) -> Optimizer:
        """The transformation for a run of `max_steps` updates."""
        return optax.adamw(
            rate_of(self.learning_rate, max_steps),
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            mask=mask,
            nesterov=self.nesterov,
        )
