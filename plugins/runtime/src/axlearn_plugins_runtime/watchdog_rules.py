"""What a watchdog watches for. A rule sees phases begin and steps end, and says what is wrong."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from axlearn_core.config import Configurable, Node, node, setting
from axlearn_plugins_runtime.actions import Action, DumpStacks

OUTSIDE_STEPS = ("restore", "compile", "evaluate", "save")
"""Phases that are not part of a step."""


_ROOM = 1.6
"""How far a limit goes beyond the configured one where phases usually end before that: with the time between two checks, a hang is
found within twice the configured time."""


class Rule(Protocol):
    """Watches for one thing. Times are of `time.monotonic`, in seconds; calls never overlap.

    Attributes:
        bound: how soon a call of `check` may find something, in seconds; None for a rule that only follows events.
        actions: what to do when it is broken, in this order.
    """

    bound: float | None
    actions: tuple[Action, ...]

    def begin(self, phase: str, step: int, now: float) -> str | None:
        """A phase begins, and the one before it ends; what is wrong with that, or None."""
        ...

    def observe(self, step: int, values: Mapping[str, float]) -> str | None:
        """A step's scalars; what is wrong with them, or None."""
        ...

    def check(self, now: float) -> str | None:
        """Called every now and then; what is wrong, or None."""
        ...


class _Quiet(Configurable):
    """A rule that sees nothing wrong."""

    bound: float | None = None

    @node
    class Config(Configurable.Config[Any]):
        """`actions`: what to do in addition to reporting."""

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


class Hang(_Quiet):
    """A phase that takes too long.

    Its limit is the larger of `seconds` and `factor` times the median of the phase's last 100 durations, but at most 1.6 times
    `seconds` where that median is below `seconds`: a hang is found within twice what is configured. Saves have a limit of their
    own: the last one of a run waits until everything is written, where the others only copy. Reported once per phase.
    """

    @node
    class Config(_Quiet.Config):
        """The least limit of each phase, and what raises it.

        Attributes:
            seconds: of input, steps and evaluation.
            start_seconds: of restoring, compiling, and the first step and evaluation.
            save_seconds: of saving. Processes wait for one another for half an hour in a save, and then say who is missing.
            factor: times the usual duration of the phase, where that is more.
            actions: what to do in addition to reporting.
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
        """Seconds that a phase may take now."""
        durations = self._durations.get(phase)
        if phase in ("restore", "compile") or (phase in ("step", "evaluate") and not durations):
            return self.cfg.start_seconds
        least = self.cfg.save_seconds if phase == "save" else self.cfg.seconds
        usual = statistics.median(durations or [0.0])
        longest = _ROOM * least if usual <= least else math.inf
        return min(longest, max(least, self.cfg.factor * usual))

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


class SlowSteps(_Quiet):
    """Steps in a row that are slower than the run's own history: `factor` times the median of the last `window` steps."""

    @node
    class Config(_Quiet.Config):
        """`steps`: how many in a row."""

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
        history.extend(slow)  # what stays slow becomes usual
        return f"{len(slow)} steps up to step {step} took {max(slow):.3g} s; usual are {usual:.3g} s"


class StarvedInput(_Quiet):
    """Devices that wait for data: the loop spends more than `share` of its time in the phase `input`.

    The loop asks for a batch while the devices compute the step before. With input that is fast enough it waits for the
    devices, and not for the batch.
    """

    @node
    class Config(_Quiet.Config):
        """`steps`: over how many steps the share is taken."""

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
            f"{waited / total:.0%} of the time of the last {self.cfg.steps} steps up to step {step} was spent waiting for "
            "input; the devices were idle"
        )


class LossSpike(_Quiet):
    """A loss far above the run's own history, for `steps` steps in a row.

    Far: above the median of the last `window` losses by `deviations` times their median absolute deviation, scaled to a
    standard deviation (1.4826).
    """

    @node
    class Config(_Quiet.Config):
        """`steps`: how many in a row."""

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
        if not math.isfinite(loss):  # the loop reports those itself
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
        return f"the loss is {high[-1]:.4g} at step {step}, {len(high)} steps above {limit:.4g}; usual is {usual:.4g}"


class _StepClock:
    """Seconds from one step's begin to the next one's, where nothing else came between."""

    def __init__(self) -> None:
        self._begin: float | None = None

    def begin(self, phase: str, now: float) -> float | None:
        """The duration of the step that ends where this phase begins."""
        if phase in OUTSIDE_STEPS:
            self._begin = None
            return None
        if phase != "step":
            return None
        begin, self._begin = self._begin, now
        return None if begin is None else now - begin
