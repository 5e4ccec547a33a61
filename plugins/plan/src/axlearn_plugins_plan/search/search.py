"""Rank every legal layout with formulas, and compile the best ones."""

import itertools
import statistics
from collections.abc import Callable, Sequence

import attrs

from axlearn_core.errors import RequestError
from axlearn_core.plugins.request import Request
from axlearn_plugins_plan.search.compile_layouts import TIMEOUT, Cache, Clock, CompiledLayout, compile_layouts
from axlearn_plugins_plan.search.figures import Coefficients
from axlearn_plugins_plan.search.rank import RankedLayout, Space, sort_key
from axlearn_plugins_plan.search.space import Choice

CHUNK = 2
"""Number of layouts to compile before the candidates are selected again with the updated bound on the memory error."""
MAX_COMPILED = 12


@attrs.frozen(kw_only=True)
class Row:
    """A layout in the result.

    Attributes:
        ranked: The layout and its estimate.
        compiled: The plan of the layout. None if the layout was only estimated.
    """

    ranked: RankedLayout
    compiled: CompiledLayout | None

    @property
    def choice(self) -> Choice:
        """The layout."""
        return self.ranked.choice

    @property
    def seconds(self) -> float:
        """Seconds per step, from the compiled figures if known, else from the estimate."""
        return self.ranked.seconds if self.compiled is None or self.compiled.seconds is None else self.compiled.seconds

    @property
    def row_seconds(self) -> float:
        """Seconds per row of the batch, to compare layouts with different batch sizes."""
        return self.seconds / max(self.ranked.rows, 1)

    @property
    def bytes(self) -> float:
        """Bytes per device, from the compiled figures if known, else from the estimate."""
        return self.ranked.estimate.total if self.compiled is None else self.compiled.bytes

    @property
    def memory_error(self) -> float | None:
        """Relative error in the estimated memory, or None if the layout was not compiled."""
        return None if self.compiled is None else self.ranked.estimate.total / self.compiled.bytes - 1


@attrs.frozen(kw_only=True)
class Result:
    """The result of a search.

    Attributes:
        rows: Compiled layouts that fit, best first, and the shipped layout even if it does not fit.
        front: The rows on the Pareto front of time and memory.
        ranked: Number of legal layouts.
        left_out: Number of layouts pruned because their estimated memory exceeds the device memory by more than `bound`.
        bound: Largest relative error in the memory estimates for compiled layouts, but at least the platform's error.
        failures: Pairs of (layout options, reason why the layout was not compiled).
        ended: Why the search ended.
    """

    rows: tuple[Row, ...]
    front: tuple[Row, ...]
    ranked: int
    left_out: int
    bound: float
    failures: tuple[tuple[str, str], ...]
    ended: str


def search(
    request: Request,
    spaces: Sequence[Space],
    cache: Cache,
    clock: Clock,
    most: int = MAX_COMPILED,
    progress: Callable[[str], None] = lambda _: None,
) -> Result:
    """Rank the layouts of all spaces, and compile the best ones within the budget.

    Args:
        request: The request for one experiment.
        spaces: One space of layouts per machine.
        cache: Cache of compiled plans.
        clock: Time budget of the search.
        most: Maximum number of compiled layouts, in addition to the shipped layouts.
        progress: Called with a line of text for each stage.

    Raises:
        RequestError: No layout is legal, or the budget is too small for one compilation.
    """
    layouts = [r for space in spaces for r in space.rank_layouts(progress)]
    shipped = [r for r in layouts if r.choice.shipped]
    fitted = {space.machine.name: space.fitted for space in spaces}
    progress(f"{len(layouts):,} layouts ranked; compiling the best ones for up to {clock.budget / 60:.3g} minutes")
    results: dict[int, CompiledLayout] = {}
    _compile(request, shipped, cache, clock, progress, results)
    shipped_results = [results[id(r)] for r in shipped]
    if shipped and all(c.error == TIMEOUT for c in shipped_results):
        raise RequestError(
            f"the budget is too small to compile one layout\n    got: {clock.budget / 60:.3g} minutes\n"
            "    fix: set a larger --budget MINUTES, or compile one layout with `axlearn plan`"
        )
    others = [r for r in layouts if not r.choice.shipped]
    ended = f"{most} layouts are compiled"
    while len(results) < most + len(shipped):
        queue = candidates(others, results, layouts, fitted)
        if not queue:
            ended = "every layout that may be better is compiled"
            break
        if not clock.allows_another:
            ended = TIMEOUT
            break
        _compile(request, queue[:CHUNK], cache, clock, progress, results)
    return _result(layouts, results, fitted, ended)


def _compile(
    request: Request,
    rows: Sequence[RankedLayout],
    cache: Cache,
    clock: Clock,
    progress: Callable[[str], None],
    results: dict[int, CompiledLayout],
) -> None:
    for row, compiled in zip(rows, compile_layouts(request, rows, cache, clock, progress), strict=True):
        results[id(row)] = compiled


def correction(layouts: Sequence[RankedLayout], results: dict[int, CompiledLayout]) -> float:
    """Return the median ratio of compiled to estimated temporaries so far, or 1 if nothing has been compiled."""
    ratios = [
        (c.bytes - c.arguments) / r.estimate.temporaries
        for r in layouts
        if (c := results.get(id(r))) is not None and not c.error and r.estimate.temporaries
    ]
    return statistics.median(ratios) if ratios else 1.0


def error_bound(
    layouts: Sequence[RankedLayout], results: dict[int, CompiledLayout], fitted: dict[str, Coefficients]
) -> float:
    """Return the largest relative error in the estimated memory so far, but at least the platform's error."""
    errors = [
        abs(r.estimate.total / c.bytes - 1) for r in layouts if (c := results.get(id(r))) is not None and not c.error
    ]
    return max([*errors, *(f.error for f in fitted.values())])


def candidates(
    pending: Sequence[RankedLayout],
    results: dict[int, CompiledLayout],
    layouts: Sequence[RankedLayout],
    fitted: dict[str, Coefficients],
) -> list[RankedLayout]:
    """Return the layouts to compile next, in order.

    Selects layouts that may fit, fastest first. Every third layout is taken from the estimated Pareto front, to find layouts
    that use less memory. If the times of several layouts agree to within 0.1%, only the layout with the least memory is
    compiled.
    """
    bound = error_bound(layouts, results, fitted)
    ratio = correction(layouts, results)
    fits = []
    for r in pending:
        capacity = r.machine.target.hbm_bytes or float("inf")
        total = r.estimate.arguments + r.estimate.temporaries * ratio
        if id(r) not in results and total <= capacity * (1 + bound):
            fits.append(r)
    names = list(dict.fromkeys(r.machine.name for r in fits))
    queues = [_queue([r for r in fits if r.machine.name == name], layouts, results) for name in names]
    return [r for turn in itertools.zip_longest(*queues) for r in turn if r is not None]


def _queue(
    fits: Sequence[RankedLayout], layouts: Sequence[RankedLayout], results: dict[int, CompiledLayout]
) -> list[RankedLayout]:
    """Return the candidates for a single machine, in the order described in `candidates`."""
    measured = {_layout_key(r) for r in layouts if id(r) in results}
    fastest = []
    for r in fits:
        if _layout_key(r) not in measured:
            measured.add(_layout_key(r))
            fastest.append(r)
    front = [r for r in _estimated_front(fits) if _layout_key(r) not in {_layout_key(f) for f in fastest[:CHUNK]}]
    mixed: list[RankedLayout] = []
    while (fastest or front) and len(mixed) < 16:
        turn = front if front and (len(results) + len(mixed)) % 3 == 2 else fastest or front
        row = turn.pop(0)
        if row not in mixed:
            mixed.append(row)
    return mixed


def _layout_key(row: RankedLayout) -> tuple[str, str]:
    """Return a key that is equal for layouts on the same machine whose times agree to within 0.1%."""
    return row.machine.name, f"{row.seconds / max(row.rows, 1):.3e}"


def _estimated_front(rows: Sequence[RankedLayout]) -> list[RankedLayout]:
    """Return the estimated Pareto front, fastest first. Each layout needs at least 10% less memory than the previous one."""
    front: list[RankedLayout] = []
    for row in sorted(rows, key=sort_key):
        if not front or row.estimate.total < 0.9 * front[-1].estimate.total:
            front.append(row)
    return front


def _result(
    layouts: Sequence[RankedLayout], results: dict[int, CompiledLayout], fitted: dict[str, Coefficients], ended: str
) -> Result:
    compiled = [Row(ranked=r, compiled=results[id(r)]) for r in layouts if id(r) in results]
    failures = [(" ".join(r.choice.words) or "as shipped", r.compiled.error) for r in compiled if r.compiled.error]  # type: ignore[union-attr]
    good = [r for r in compiled if not r.compiled.error]  # type: ignore[union-attr]
    good.sort(key=lambda r: (not r.compiled.fits, r.row_seconds, r.bytes))  # type: ignore[union-attr]
    rows = [r for r in good if r.compiled.fits or r.choice.shipped]  # type: ignore[union-attr]
    bound = error_bound(layouts, results, fitted)
    out = sum(r.estimate.total > (r.machine.target.hbm_bytes or float("inf")) * (1 + bound) for r in layouts)
    return Result(
        rows=tuple(rows),
        front=tuple(pareto(rows)),
        ranked=len(layouts),
        left_out=out,
        bound=bound,
        failures=tuple(failures),
        ended=ended,
    )


def pareto(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that fit and lie on the Pareto front of time and memory, fastest first."""
    front: list[Row] = []
    for row in sorted(rows, key=lambda r: (r.row_seconds, r.bytes)):
        if row.compiled is not None and row.compiled.fits and (not front or row.bytes < front[-1].bytes):
            front.append(row)
    return front
