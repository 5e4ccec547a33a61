"""Learning-rate schedules: optax schedules as nodes. They end at the trainer's `max_steps`.

Every schedule starts with a linear warm-up over W = `warmup_steps` updates. Update `i` has the rate
`peak * (i + 1) / (W + 1)`, so the first rate is not zero and update W is the first with the peak rate. A number of steps
is an int, or a float that gives a fraction of `max_steps`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import optax

from axlearn_core.config import Node, get_fields, node, setting
from axlearn_core.errors import Problem

Schedule = Callable[[Any], Any]
"""Function from the index of an update (int32 scalar, from 0) to a value (float32 scalar)."""


def resolve_steps(steps: int | float, max_steps: int) -> int:
    """Return a number of steps. A float is a fraction of `max_steps`."""
    return round(steps * max_steps) if isinstance(steps, float) else steps


@node
class _WarmupSchedule(Node[Schedule]):
    peak: float = setting(default=3e-4, ge=0)
    warmup_steps: int | float = setting(default=0.02, ge=0)

    def validate(self) -> Iterable[Problem]:
        """Check that floats are fractions."""
        for name, value in get_fields(self).items():
            if name in ("warmup_steps", "decay_steps") and isinstance(value, float) and value > 1:
                yield Problem(
                    path=name,
                    message="a float is a fraction of max_steps",
                    got=str(value),
                    expected="at most 1.0, or an int for a number of steps",
                )

    def build(self, *, max_steps: int, **_: object) -> Schedule:
        """Return the schedule for a run of `max_steps` updates."""
        warmup = resolve_steps(self.warmup_steps, max_steps)
        decay = self._build_decay(max(1, max_steps - warmup), max_steps)
        if not warmup:
            return decay
        rise = optax.linear_schedule(self.peak / (warmup + 1), self.peak, warmup)
        return optax.join_schedules([rise, decay], [warmup])

    def _build_decay(self, steps: int, max_steps: int) -> Schedule:
        raise NotImplementedError


@node
class Constant(_WarmupSchedule):
    """A constant rate of `peak` after the warm-up."""

    def _build_decay(self, steps: int, max_steps: int) -> Schedule:
        return optax.constant_schedule(self.peak)


@node
class Cosine(_WarmupSchedule):
    """Cosine decay from `peak` to `peak * end_ratio` at `max_steps` (Loshchilov & Hutter, 2017)."""

    end_ratio: float = setting(default=0.1, ge=0, le=1)

    def _build_decay(self, steps: int, max_steps: int) -> Schedule:
        return optax.cosine_decay_schedule(self.peak, steps, alpha=self.end_ratio)


@node
class Linear(_WarmupSchedule):
    """Linear decay from `peak` to `peak * end_ratio` at `max_steps`."""

    end_ratio: float = setting(default=0.0, ge=0, le=1)

    def _build_decay(self, steps: int, max_steps: int) -> Schedule:
        return optax.linear_schedule(self.peak, self.peak * self.end_ratio, steps)


@node
class WarmupStableDecay(_WarmupSchedule):
    """Constant `peak`, then linear decay to `peak * end_ratio` over the last `decay_steps` (Hu et al., 2024, MiniCPM)."""

    decay_steps: int | float = setting(default=0.2, ge=0)
    end_ratio: float = setting(default=0.0, ge=0, le=1)

    def _build_decay(self, steps: int, max_steps: int) -> Schedule:
        decay = min(steps, resolve_steps(self.decay_steps, max_steps))
        end = self.peak * self.end_ratio
        if not decay:
            return optax.constant_schedule(self.peak)
        return optax.linear_schedule(self.peak, end, decay, transition_begin=steps - decay)
