"""Schedule-free AdamW, and the `schedule-free` feature."""

from typing import Any, Protocol, TypeVar, runtime_checkable

import attrs
import optax
from optax.contrib import schedule_free, schedule_free_eval_params

from axlearn_core.config import Node, get, node, patch, setting
from axlearn_core.contracts.capabilities import get_learning_rate
from axlearn_core.contracts.experiment import get_optimizer_config
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.learn import Constant
from axlearn_core.learn.optimizers import Optimizer, convert_learning_rate
from axlearn_core.learn.schedules import Schedule
from axlearn_core.plugins.feature import Feature

Tree = TypeVar("Tree", bound=Node[Any])


@runtime_checkable
class WarmsUp(Protocol):
    """Config of a schedule with a warm-up to its peak.

    Attributes:
        peak: Highest value.
        warmup_steps: Number of steps until the peak, or a fraction of all steps.
    """

    peak: float
    warmup_steps: int | float


@node
class ScheduleFree(Node[Optimizer]):
    """AdamW without a decaying schedule (Defazio et al., 2024, arXiv 2405.15682).

    Wraps `optax.contrib.schedule_free`. Gradients are taken at an interpolation between the iterates and their average.
    Evaluation and export use the average. The state per parameter is as large as AdamW's. The average is exact if the
    parameters are float32.

    Attributes:
        learning_rate: Value or schedule. It should stay constant after its warm-up.
        b1: Weight of the average in the interpolation. It replaces momentum.
        b2: Decay of the second moment.
        eps: Added to denominators.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
        weight_lr_power: The weight of an iterate in the average is the largest learning rate so far, raised to this power.
    """

    learning_rate: float | Node[Schedule] = setting(default=Constant(peak=2.5e-3), ge=0)
    b1: float = setting(default=0.9, gt=0, lt=1)
    b2: float = setting(default=0.999, ge=0, lt=1)
    eps: float = setting(default=1e-8, gt=0)
    weight_decay: float = setting(default=0.1, ge=0)
    weight_lr_power: float = setting(default=2.0, ge=0)

    def build(self, *, max_steps: int, mask: Any = None, **_: object) -> Optimizer:
        """Return the transformation for a run of `max_steps` updates."""
        rate = convert_learning_rate(self.learning_rate, max_steps)
        base = optax.chain(
            optax.scale_by_rms(decay=self.b2, eps=self.eps, eps_in_sqrt=False, bias_correction=True),
            optax.add_decayed_weights(self.weight_decay, mask),
            optax.scale_by_learning_rate(rate),
        )
        return schedule_free(base, rate, b1=self.b1, weight_lr_power=self.weight_lr_power)

    def evaluation_params(self, state: Any, params: Any) -> Any:
        """Return the average, computed from the parameters and the iterates in the state."""
        return schedule_free_eval_params(state, params)


@node
class UseScheduleFree(Feature):
    """Trains with schedule-free AdamW, which needs no horizon.

    Evaluation, generation and export use its average. The learning rate keeps the peak and the warm-up of the old
    optimizer. `learning_rate` sets a different peak. Published runs use one to ten times the peak of AdamW. `b1` defaults
    to 0.9. If the experiment already uses schedule-free AdamW, this only sets the options.
    """

    stage = "replace"
    excludes = ("ema", "optimizer")
    replaces = ("learner.optimizer",)

    learning_rate: float | None = setting(default=None, gt=0)
    b1: float | None = setting(default=None, gt=0, lt=1)

    def apply(self, cfg: Tree) -> Tree:
        """Set `learner.optimizer`."""
        old = get_optimizer_config(cfg)
        if not isinstance(old, Node):
            raise ConfigError(
                Problem(
                    path="learner.optimizer",
                    message="there is no optimizer to replace",
                    expected="a learner with an optimizer, such as the core's",
                    fix="remove schedule-free",
                )
            )
        new = old if isinstance(old, ScheduleFree) else ScheduleFree(learning_rate=_constant(old))
        options: dict[str, Any] = {} if self.b1 is None else {"b1": self.b1}
        if self.learning_rate is not None:
            rate = new.learning_rate
            peak = self.learning_rate
            options["learning_rate"] = attrs.evolve(rate, peak=peak) if isinstance(rate, Constant) else peak
        new = attrs.evolve(new, **options)
        return cfg if new == old else patch(cfg, {"learner.optimizer": new})

    def in_effect(self, cfg: Node[Any]) -> bool:
        """Return whether the learner already uses these options."""
        return isinstance(get(cfg, "learner.optimizer"), ScheduleFree) and self.apply(cfg) == cfg


def _constant(optimizer: Any) -> Any:
    """Return an optimizer's learning rate without its decay."""
    rate = get_learning_rate(optimizer)
    if isinstance(rate, WarmsUp):
        return Constant(peak=rate.peak, warmup_steps=rate.warmup_steps)
    return rate if isinstance(rate, float) else ScheduleFree().learning_rate
