"""Rules of a watchdog. A rule follows phases and steps, and reports problems."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from axlearn_core.config import Configurable, Node, node, setting
from axlearn_plugins_runtime.actions import Action, DumpStacks

OUTSIDE_STEPS = ("restore", "compile", "rollout", "evaluate", "save")
"""Phases that are not part of a step."""


_LIMIT_FACTOR = 1.6
"""Maximum factor by which a configured limit is raised while phases usually end within it.

The interval between two checks adds up to an eighth, so a hang is reported within twice the configured time."""


class Rule(Protocol):
    """A condition that the watchdog checks. Times are seconds of `time.monotonic`. Calls never overlap.

    Attributes:
        bound: Shortest time after which `check` can report a problem, in seconds. None if the rule only follows events.
        actions: Actions to run when the rule is broken, in order.
    """

    bound: float | None
    actions: tuple[Action, ...]

    def begin(self, phase: str, step: int, now: float) -> str | None:
        """Handle the start of a phase, which ends the previous one. Return a problem or None."""
        ...

    def observe(self, step: int, values: Mapping[str, float]) -> str | None:
        """Handle the scalars of a step. Return a problem or None."""
        ...

    def check(self, now: float) -> str | None:
        """Check periodically. Return a problem or None."""
        ...


class _BaseRule(Configurable):
    """A rule that never reports a problem."""

    bound: float | None = None

    @node
    class Config(Configurable.Config[Any]):
        """Actions of the rule.

        Attributes:
            actions: Actions to run in addition to the report.
        """

        actions: tuple[Node[Action], ...] = ()

    def __init__(self, cfg: Any):
        self.cfg: Any = cfg
        self.actions: tuple[Action, ...] = tuple(action.build() for action in cfg.actions)

    def begin(self, phase: str, step: int, now: float) -> str | None:
        """See `Rule`."""
        return None

    def observe(self, step: int, values: Mapping[str, float]) -> str | None:
        """See `Rule`."""
        return None

    def check(self, now: float) -> str | None:
        """See `Rule`."""
        return None


class Hang(_BaseRule):
    """A phase that takes too long. Reported once per phase.

    The limit is the larger of `seconds` and `factor` times the median of the phase's last 100 durations. However, if the median
    is at most `seconds`, the limit is capped at 1.6 times `seconds`, so that a hang is reported within twice the configured
    time. Saves have a separate limit, because the last save of a run waits until everything is written. Other saves only copy
    the state.
    """

    @node
    class Config(_BaseRule.Config):
        """Limits for each phase.

        Attributes:
            seconds: Minimum limit for input, rollouts, steps and evaluation.
            start_seconds: Limit for restoring, compiling, and the first rollout, step and evaluation.
            save_seconds: Minimum limit for a save. During a save, processes wait for each other for up to half an hour and then
                report the missing process.
            factor: Multiple of a phase's usual duration to which its limit is raised.
            actions: Actions to run in addition to the report.
        """

        seconds: float = setting(default=600.0, gt=0)
        start_seconds: float = setting(default=3600.0, gt=0)
        save_seconds: float = setting(default=2400.0, gt=0)
        factor: float = setting(default=5.0, ge=1)
        actions: tuple[Node[Action], ...] = (DumpStacks.Config(),)

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.bound = min(cfg.seconds, cfg.start_seconds, cfg.save_seconds)
        self._durations: dict[str, deque[float]] = {}
        self._phase: tuple[str, int, float] | None = None
        self._reported = False

    def limit(self, phase: str) -> float:
        """Return the current limit for a phase in seconds."""
        durations = self._durations.get(phase)
        if phase in ("restore", "compile") or (phase in ("step", "evaluate", "rollout") and not durations):
            return self.cfg.start_seconds
        minimum = self.cfg.save_seconds if phase == "save" else self.cfg.seconds
        usual = statistics.median(durations or [0.0])
        maximum = _LIMIT_FACTOR * minimum if usual <= minimum else math.inf
        return min(maximum, max(minimum, self.cfg.factor * usual))

    def begin(self, phase: str, step: int, now: float) -> str | None:
        """See `Rule`."""
        if self._phase is not None and not self._reported:
            self._durations.setdefault(self._phase[0], deque(maxlen=100)).append(now - self._phase[2])
        self._phase, self._reported = (phase, step, now), False
        return None

    def check(self, now: float) -> str | None:
        """See `Rule`."""
        if self._phase is None or self._reported:
            return None
        phase, step, since = self._phase
        limit = self.limit(phase)
        if now - since <= limit:
            return None
        self._reported = True
        return (
            f"no progress for {now - since:.1f} s in the phase {phase!r} after step {step}; its limit is {limit:.1f} s"
        )


class SlowSteps(_BaseRule):
    """Consecutive steps that take more than `factor` times the median of the last `window` steps."""

    @node
    class Config(_BaseRule.Config):
        """Threshold and history for the rule.

        Attributes:
            factor: Multiple of the median duration above which a step is slow.
            steps: Number of consecutive slow steps that trigger a report.
            window: Number of steps in the history.
        """

        factor: float = setting(default=3.0, gt=1)
        steps: int = setting(default=3, ge=1)
        window: int = setting(default=100, ge=10)

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._history: deque[float] = deque(maxlen=cfg.window)
        self._slow: list[float] = []
        self._clock = _StepClock()

    def begin(self, phase: str, step: int, now: float) -> str | None:
        """See `Rule`."""
        seconds = self._clock.begin(phase, now)
        if seconds is None:
            return None
        history = self._history
        usual = statistics.median(history) if len(history) >= 10 else math.inf
        if seconds <= self.cfg.factor * usual:
            history.append(seconds)
            self._slow = []
            return None
        self._slow.append(seconds)
        if len(self._slow) < self.cfg.steps:
            return None
        slow, self._slow = self._slow, []
        history.extend(slow)  # a permanently slower step becomes the new normal
        return (
            f"the last {len(slow)} steps (up to step {step}) each took up to {max(slow):.3g} s; "
            f"a step usually takes {usual:.3g} s"
        )


class StarvedInput(_BaseRule):
    """Devices that wait for data: the loop spends more than `share` of its time in the `input` phase.

    The loop requests a batch while the devices compute the previous step. If the input is fast enough, the loop waits for the
    devices and not for the batch.
    """

    @node
    class Config(_BaseRule.Config):
        """Threshold for the rule.

        Attributes:
            share: Fraction of the time above which the rule is broken.
            steps: Number of steps over which the fraction is measured.
        """

        share: float = setting(default=0.8, gt=0, le=1)
        steps: int = setting(default=50, ge=2)

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._spent = {"input": 0.0, "step": 0.0}
        self._phase: tuple[str, float] | None = None
        self._steps = 0

    def begin(self, phase: str, step: int, now: float) -> str | None:
        """See `Rule`."""
        if self._phase is not None and self._phase[0] in self._spent:
            self._spent[self._phase[0]] += now - self._phase[1]
            self._steps += self._phase[0] == "step"
        self._phase = (phase, now)
        if self._steps < self.cfg.steps:
            return None
        waited, total = self._spent["input"], sum(self._spent.values())
        self._spent, self._steps = dict.fromkeys(self._spent, 0.0), 0
        if not total or waited <= self.cfg.share * total:
            return None
        return (
            f"{waited / total:.0%} of the time in the last {self.cfg.steps} steps up to step {step} was spent waiting "
            "for input; the devices were idle"
        )


class LossSpike(_BaseRule):
    """A loss far above the run's own history, for `steps` consecutive steps.

    The limit is the median of the last `window` losses plus `deviations` times their median absolute deviation, scaled to a
    standard deviation (1.4826).
    """

    @node
    class Config(_BaseRule.Config):
        """Threshold and history for the rule.

        Attributes:
            deviations: Number of deviations above the median.
            steps: Number of consecutive high losses that trigger a report.
            window: Number of losses in the history.
        """

        deviations: float = setting(default=10.0, gt=0)
        steps: int = setting(default=3, ge=1)
        window: int = setting(default=50, ge=20)

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._history: deque[float] = deque(maxlen=cfg.window)
        self._high: list[float] = []

    def observe(self, step: int, values: Mapping[str, float]) -> str | None:
        """See `Rule`."""
        loss = values.get("loss", math.nan)
        if not math.isfinite(loss):  # the loop reports non-finite losses itself
            return None
        limit, usual = math.inf, math.nan
        if len(self._history) >= 20:
            usual = statistics.median(self._history)
            spread = 1.4826 * statistics.median(abs(x - usual) for x in self._history)
            limit = usual + self.cfg.deviations * max(spread, 1e-3 * abs(usual))
        if loss <= limit:
            self._history.append(loss)
            self._high = []
            return None
        self._high.append(loss)
        if len(self._high) < self.cfg.steps:
            return None
        high, self._high = self._high, []
        self._history.extend(high)
        return f"the loss is {high[-1]:.4g} at step {step}, {len(high)} steps above {limit:.4g}; the usual loss is {usual:.4g}"


class _StepClock:
    """Measures the time between the starts of consecutive steps, if there is no other phase between them."""

    def __init__(self) -> None:
        self._begin: float | None = None

    def begin(self, phase: str, now: float) -> float | None:
        """Return the duration of the step that ends when this phase begins, or None."""
        if phase in OUTSIDE_STEPS:
            self._begin = None
            return None
        if phase != "step":
            return None
        begin, self._begin = self._begin, now
        return None if begin is None else now - begin
