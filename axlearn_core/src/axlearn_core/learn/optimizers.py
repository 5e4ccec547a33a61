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

import attrs
import optax

from axlearn_core.config import Node, node, setting
from axlearn_core.learn.schedules import Cosine, Schedule

Axes = Mapping[str, tuple[str | None, ...] | None]
LearningRate = float | Node[Schedule]


@attrs.frozen
class Growth:
    """Sizes of a weight matrix, and its sizes in the model of the base width.

    Attributes:
        fan_in: Number of inputs.
        fan_out: Number of outputs.
        base_fan_in: Number of inputs at the base width.
        base_fan_out: Number of outputs at the base width.
    """

    fan_in: float
    fan_out: float
    base_fan_in: float
    base_fan_out: float


@runtime_checkable
class ScalesWithWidth(Protocol):
    """Node of an optimizer that defines how the learning rate of a weight matrix depends on the width (muP)."""

    def width_scale(self, axes: tuple[str | None, ...], growth: Growth) -> float:
        """Return the factor for the updates of a weight matrix.

        Args:
            axes: Logical axis name of each dimension.
            growth: Sizes of the matrix.
        """
        ...


def adam_width_scale(growth: Growth) -> float:
    """Return the factor for optimizers whose updates have a size that the gradients do not determine (Adam, Lion).

    The change of an output then grows with the number of inputs (Yang et al., 2022, arXiv 2203.03466, table 8).
    """
    return growth.base_fan_in / growth.fan_in


def width_scale(optimizer: Node[Any], axes: tuple[str | None, ...], growth: Growth) -> float | None:
    """Return the factor for the updates of a weight matrix, or None if the optimizer does not define one."""
    if isinstance(optimizer, ScalesWithWidth):
        return optimizer.width_scale(axes, growth)
    return adam_width_scale(growth) if type(optimizer).owner in _ADAM_LIKE else None


_ADAM_LIKE = (
    optax.adam,
    optax.adamw,
    optax.adamax,
    optax.adamaxw,
    optax.amsgrad,
    optax.lion,
    optax.nadam,
    optax.nadamw,
)


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

    def width_scale(self, axes: tuple[str | None, ...], growth: Growth) -> float:
        """Return the factor for the updates of a weight matrix; see `ScalesWithWidth`."""
        return adam_width_scale(growth)
