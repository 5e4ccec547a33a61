"""Find the largest batch that fits on a machine. Each step of the search compiles the program for one batch size."""

from collections.abc import Callable, Mapping

import attrs

from axlearn_plugins_plan.memory import Memory

MAX_COMPILES = 6
"""Maximum number of batches to compile. Memory grows almost linearly with the row count, so three or four are usually enough."""
_PRECISION = 16
"""The search stops when the result is at most 1/16 smaller than a batch that does not fit."""


@attrs.frozen(kw_only=True)
class LargestBatch:
    """The result of a search. Bytes are per device.

    Attributes:
        rows: Rows of the largest batch that fits. None if the smallest possible batch does not fit.
        bytes: Memory of that batch. None if there is no such batch.
        too_large: Rows of the smallest batch that is known not to fit. None if no batch was too large.
        too_large_bytes: Memory of that batch, or None.
        compiles: Number of batches that were compiled.
    """

    rows: int | None
    bytes: int | None
    too_large: int | None
    too_large_bytes: int | None
    compiles: int


def find_largest_batch(
    rows: int, unit: int, memory: Memory, measure: Callable[[int], Memory], max_compiles: int = MAX_COMPILES
) -> LargestBatch:
    """Search for the largest number of rows that fits.

    Args:
        rows: Number of rows in a batch whose memory is known.
        unit: The number of rows in a batch must be a multiple of this number.
        memory: Memory of the batch with `rows` rows. Its capacity must be known.
        measure: Compiles a batch with the given number of rows, and returns its memory.
        max_compiles: Maximum number of calls to `measure`.
    """
    points, compiles = {rows // unit: memory}, 0
    while compiles < max_compiles:
        low, high = _bounds(points)
        if high is not None and high - low <= max(1, low // _PRECISION):
            break
        count = _next(points, low, high)
        points[count] = measure(count * unit)
        compiles += 1
    low, high = _bounds(points)
    return LargestBatch(
        rows=low * unit or None,
        bytes=points[low].total if low else None,
        too_large=None if high is None else high * unit,
        too_large_bytes=None if high is None else points[high].total,
        compiles=compiles,
    )


def _bounds(points: Mapping[int, Memory]) -> tuple[int, int | None]:
    """Return the largest count that is known to fit, or 0, and the smallest that is known not to fit, or None."""
    high = min((count for count, memory in points.items() if not memory.fits), default=None)
    return max((c for c, m in points.items() if m.fits and (high is None or c < high)), default=0), high


def _next(points: Mapping[int, Memory], low: int, high: int | None) -> int:
    """Return the next count to compile, based on a line through two known points."""
    if low == 0:
        return 1
    if high is None and len(points) == 1:
        return 2 * low
    other = high if high is not None else min(c for c in points if c != low)
    slope = (points[other].total - points[low].total) / (other - low)
    room = (points[low].capacity or 0) - points[low].total
    guess = low + int(room / slope) if slope > 0 else 2 * low
    # If guesses are too low, the search may advance by only one row per compilation, so increase the count by at least
    # a sixteenth.
    guess = max(guess, low + max(1, low // _PRECISION))
    return min(guess, 8 * low) if high is None else min(guess, high - 1)
