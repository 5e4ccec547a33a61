"""`DraftGate`: stop drafting while it makes tokens slower."""

import attrs

SAMPLES = 8
"""Number of steps to measure before a mode can be compared with the other one."""
SETTLING = 2
"""Number of steps after a change of mode whose durations do not count."""
FIRST_PROBE, LAST_PROBE = 64, 4096
"""Number of steps until the slower mode is measured again: at first, and at most. It doubles after each measurement that changes
nothing."""
MARGIN = 0.95
"""The other mode must take less than this fraction of the time, so that noise does not change the mode."""
_WEIGHT = 0.2


@attrs.define
class _Mode:
    """The measured cost of a mode.

    Attributes:
        cost: Moving average of the seconds per token of a request; None before the first measurement.
        samples: Number of measurements since the mode was entered.
    """

    cost: float | None = None
    samples: int = 0

    def add(self, cost: float) -> None:
        self.cost = cost if self.cost is None else (1 - _WEIGHT) * self.cost + _WEIGHT * cost
        self.samples += 1


@attrs.define
class _Choice:
    """The choice between drafting and decoding for one range of batch sizes.

    Attributes:
        drafting: Whether the steps draft at present.
        preferred: The faster mode, as far as it is known.
        settling: Number of steps whose durations do not count yet.
        steps: Number of steps in the preferred mode since the last probe.
        probe_after: Number of these steps after which the other mode is measured again.
    """

    modes: dict[bool, _Mode] = attrs.field(factory=lambda: {True: _Mode(), False: _Mode()})
    drafting: bool = True
    preferred: bool = True
    settling: int = SETTLING
    steps: int = 0
    probe_after: int = FIRST_PROBE

    def record(self, cost: float) -> None:
        """Record a step, and choose the mode of the next one."""
        if self.settling:
            self.settling -= 1
            return
        mode, other = self.modes[self.drafting], self.modes[not self.drafting]
        mode.add(cost)
        if mode.samples < SAMPLES:
            return
        if other.cost is None:
            self._enter(not self.drafting)
        elif self.drafting != self.preferred:  # a probe ends
            self._end_probe(mode, other)
        else:
            self.steps += 1
            if self.steps >= self.probe_after:
                self._enter(not self.preferred)

    def _end_probe(self, probed: _Mode, preferred: _Mode) -> None:
        assert probed.cost is not None
        assert preferred.cost is not None
        if probed.cost < MARGIN * preferred.cost:
            self.preferred, self.probe_after, self.steps = self.drafting, FIRST_PROBE, 0
        else:
            self.probe_after = min(LAST_PROBE, 2 * self.probe_after)
            self._enter(self.preferred)

    def _enter(self, drafting: bool) -> None:
        self.drafting, self.settling, self.steps = drafting, SETTLING, 0
        self.modes[drafting].samples = 0


class DraftGate:
    """Decides whether steps draft, from the measured time per token with and without drafts.

    Drafts cost more for large batches, so batches of about the same size share a decision. Steps with drafts are measured first,
    and then steps without them. Now and then, the slower of the two is measured again.
    """

    def __init__(self) -> None:
        self._choices: dict[int, _Choice] = {}

    def allows(self, rows: int) -> bool:
        """Return True if a step with this many decoding requests should draft."""
        choice = self._choices.get(rows.bit_length())
        return choice is None or choice.drafting

    def record(self, rows: int, tokens: int, seconds: float) -> None:
        """Record a step that only decodes.

        Args:
            rows: Number of requests in the step.
            tokens: Number of tokens that they got.
            seconds: Time since the results of the previous step.
        """
        choice = self._choices.setdefault(rows.bit_length(), _Choice())
        choice.record(seconds * rows / max(1, tokens))
