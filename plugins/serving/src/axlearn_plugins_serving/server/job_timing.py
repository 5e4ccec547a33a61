"""`Timing`: the times of the engine requests behind an HTTP request."""

import time

import attrs


@attrs.define
class Timing:
    """The times of a job, from `time.monotonic`. Times that have not been reached are None.

    Attributes:
        began: When the job was created.
        started: When the engine started the first of its requests.
        first: When its first token arrived.
        last: When its last token arrived.
    """

    began: float = attrs.field(factory=time.monotonic)
    started: float | None = None
    first: float | None = None
    last: float | None = None

    @property
    def queue_seconds(self) -> float | None:
        """Seconds in the queue."""
        return _difference(self.began, self.started)

    @property
    def prefill_seconds(self) -> float | None:
        """Seconds from the start to the first token."""
        return _difference(self.started, self.first)

    @property
    def decode_seconds(self) -> float | None:
        """Seconds from the first token to the last."""
        return _difference(self.first, self.last)

    @property
    def first_token_seconds(self) -> float | None:
        """Seconds until the first token."""
        return _difference(self.began, self.first)

    @property
    def total_seconds(self) -> float | None:
        """Seconds until the last token."""
        return _difference(self.began, self.last)


def _difference(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else max(0.0, end - begin)
