"""Schedule-free AdamW, and the feature that trains with it."""

from typing import Any, Protocol, TypeVar, runtime_checkable

import attrs
import optax
from optax.contrib import schedule_free, schedule_free_eval_params

from axlearn_core.config import Node, get, node, patch, setting
from axlearn_core.contracts.capabilities import learning_rate_of
from axlearn_core.contracts.experiment import optimizer_of
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.learn import Constant
from axlearn_core.learn.optimizers import Optimizer, rate_of
from axlearn_core.learn.schedules import Schedule
from axlearn_core.plugins.feature import Feature

Tree = TypeVar("Tree", bound=Node[Any])


@runtime_checkable
class WarmsUp(Protocol):
    """The config of a schedule that rises to its peak.

    Attributes:
        peak: the highest value.
        warmup_steps: steps until then, or a fraction of all steps.
    """

    peak: float
    warmup_steps: int | float


@node
class ScheduleFree(Node[Optimizer]):
    """AdamW without a decaying schedule (Defazio et al., 2024, arXiv 2405.15682), as `optax.contrib.schedule_free`.

    Gradients are taken at an interpolation between the iterates and their average; evaluation and export use the average.
    The state of each parameter is as large as AdamW's. Parameters in float32 keep the average exact.

    Attributes:
        learning_rate: constant after its warm-up; a decay would defeat the purpose.
        b1: the share of the average in the interpolation, which stands for momentum.
        weight_lr_power: the weight of an iterate in the average is its largest learning rate so far to this power.
    """

    learning_rate: float | Node[Schedule] = setting(default=Constant(peak=2.5e-3), ge=0)
    b1: float = setting(default=0.9, gt=0, lt=1)
    b2: float = setting(default=0.999, ge=0, lt=1)
    eps: float = setting(default=1e-8, gt=0)
    weight_decay: float = setting(default=0.1, ge=0)
    weight_lr_power: float = setting(default=2.0, ge=0)

    def build(self, *, max_steps: int, mask: Any = None, **_: object) -> Optimizer:
        """The transformation for a run of `max_steps` updates."""
        rate = rate_of(self.learning_rate, max_steps)
        base = optax.chain(
            optax.scale_by_rms(decay=self.b2, eps=self.eps, eps_in_sqrt=False, bias_correction=True),
            optax.add_decayed_weights(self.weight_decay, mask),
            optax.scale_by_learning_rate(rate),
        )
        return schedule_free(base, rate, b1=self.b1, weight_lr_power=self.weight_lr_power)

    def evaluation_params(self, state: Any, params: Any) -> Any:
        """The average, computed from the parameters and the iterates in the state."""
        return schedule_free_eval_params(state, params)


@node
class UseScheduleFree(Feature):
    """Trains with schedule-free AdamW, which needs no horizon; evaluation, generation and export use its average.

    The peak and the warm-up of the learning rate are those of the optimizer that stood there; `learning_rate` sets another
    peak. Published runs take a peak of one to ten times that of AdamW. `b1` is 0.9 where it is not given. On an experiment
    that trains so already, the options are set.
    """

    stage = "replace"
    excludes = ("ema", "optimizer")

    learning_rate: float | None = setting(default=None, gt=0)
    b1: float | None = setting(default=None, gt=0, lt=1)

    def apply(self, cfg: Tree) -> Tree:
        """Sets `learner.optimizer`."""
        old = optimizer_of(cfg)
        if not isinstance(old, Node):
            raise ConfigError(
                Problem(
                    path="learner.optimizer",
                    message="schedule-free finds no optimizer to replace",
                    expected="a learner with an optimizer, such as the core's",
                    fix="leave schedule-free out",
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
        """The learner trains so."""
        return isinstance(get(cfg, "learner.optimizer"), ScheduleFree) and self.apply(cfg) == cfg


def _constant(optimizer: Any) -> Any:
    """The learning rate of an optimizer without its decay."""
    rate = learning_rate_of(optimizer)
    if isinstance(rate, WarmsUp):
        return Constant(peak=rate.peak, warmup_steps=rate.warmup_steps)
    return rate if isinstance(rate, float) else ScheduleFree().learning_rate
