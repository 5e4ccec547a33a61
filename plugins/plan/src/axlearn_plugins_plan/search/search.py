"""The search: formulas rank every legal layout, the compiler has the last word on the best."""

import itertools
import statistics
from collections.abc import Callable, Sequence

import attrs

from axlearn_core.errors import RequestError
from axlearn_core.plugins.request import Request
from axlearn_plugins_plan.search.compiled import TIMEOUT, Cache, Clock, Compiled, compile_layouts
from axlearn_plugins_plan.search.figures import Coefficients
from axlearn_plugins_plan.search.rank import Ranked, Space, order
from axlearn_plugins_plan.search.space import Choice

CHUNK = 2
"""Layouts that are compiled before the rest are looked at again with the errors seen so far."""
MOST = 12


@attrs.frozen(kw_only=True)
class Row:
    """A layout of the result.

    Attributes:
        ranked: the layout and its estimate.
        compiled: its plan; None where it was only estimated.
    """

    ranked: Ranked
    compiled: Compiled | None

    @property
    def choice(self) -> Choice:
        """The layout."""
        return self.ranked.choice

    @property
    def seconds(self) -> float:
        """Of a step, by the compiled figures where there are some."""
        return self.ranked.seconds if self.compiled is None or self.compiled.seconds is None else self.compiled.seconds

    @property
    def row_seconds(self) -> float:
        """Of a row of the batch, which compares layouts of several batches."""
        return self.seconds / max(self.ranked.rows, 1)

    @property
    def bytes(self) -> float:
        """Of one device, likewise."""
        return self.ranked.estimate.total if self.compiled is None else self.compiled.bytes

    @property
    def memory_error(self) -> float | None:
        """Estimated over compiled bytes, less 1."""
        return None if self.compiled is None else self.ranked.estimate.total / self.compiled.bytes - 1


@attrs.frozen(kw_only=True)
class Result:
    """What a search found.

    Attributes:
        rows: what was compiled and fits, the best first, the layout as it ships among them whether it fits or not.
        front: of `rows`, those that none is better than in both time and memory.
        ranked: how many layouts were legal.
        left_out: how many were pruned because their estimated memory is too large by more than the error bound.
        bound: that bound: the greatest relative error of the estimate among what was compiled, or that of the platform.
        failures: words of a layout -> why it was not compiled.
        ended: why the search ended.
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
    most: int = MOST,
    progress: Callable[[str], None] = lambda _: None,
) -> Result:
    """Ranks the layouts of all spaces and compiles the best of them within the budget.

    Raises:
        RequestError: no layout is legal, or the budget is too small for one compilation.
    """
    layouts = [r for space in spaces for r in space.ranked(progress)]
    shipped = [r for r in layouts if r.choice.shipped]
    fitted = {space.machine.name: space.fitted for space in spaces}
    progress(f"{len(layouts):,} layouts ranked; compiling the best, up to {clock.budget / 60:.3g} minutes")
    results: dict[int, Compiled] = {}
    _compile(request, shipped, cache, clock, progress, results)
    first = [results[id(r)] for r in shipped]
    if shipped and all(c.error == TIMEOUT for c in first):
        raise RequestError(
            f"the budget is too small to compile one layout\n    got: {clock.budget / 60:.3g} minutes\n"
            "    fix: give more (--budget MINUTES), or compile it by itself: `axlearn plan` without a search"
        )
    rest = [r for r in layouts if not r.choice.shipped]
    ended = f"{most} layouts are compiled"
    while len(results) < most + len(shipped):
        waiting = candidates(rest, results, layouts, fitted)
        if not waiting:
            ended = "every layout that may be better is compiled"
            break
        if not clock.allows_another:
            ended = TIMEOUT
            break
        _compile(request, waiting[:CHUNK], cache, clock, progress, results)
    return _result(layouts, results, fitted, ended)


def _compile(
    request: Request,
    rows: Sequence[Ranked],
    cache: Cache,
    clock: Clock,
    progress: Callable[[str], None],
    results: dict[int, Compiled],
) -> None:
    for row, compiled in zip(rows, compile_layouts(request, rows, cache, clock, progress), strict=True):
        results[id(row)] = compiled


def correction(layouts: Sequence[Ranked], results: dict[int, Compiled]) -> float:
    """Compiled over estimated temporaries, the median of what was compiled so far; 1 before."""
    ratios = [
        (c.bytes - c.arguments) / r.estimate.temporaries
        for r in layouts
        if (c := results.get(id(r))) is not None and not c.error and r.estimate.temporaries
    ]
    return statistics.median(ratios) if ratios else 1.0


def error_bound(layouts: Sequence[Ranked], results: dict[int, Compiled], fitted: dict[str, Coefficients]) -> float:
    """The greatest relative error of the estimated memory so far, and no less than that of the platform."""
    errors = [
        abs(r.estimate.total / c.bytes - 1) for r in layouts if (c := results.get(id(r))) is not None and not c.error
    ]
    return max([*errors, *(f.error for f in fitted.values())])


def candidates(
    rest: Sequence[Ranked], results: dict[int, Compiled], layouts: Sequence[Ranked], fitted: dict[str, Coefficients]
) -> list[Ranked]:
    """What to compile next, in order: what may fit, the fastest first, and every third from the estimated front.

    Of layouts that take the same time to a thousandth, only the one of least memory is asked for.
    """
    bound = error_bound(layouts, results, fitted)
    ratio = correction(layouts, results)
    fits = []
    for r in rest:
        capacity = r.machine.target.hbm_bytes or float("inf")
        total = r.estimate.arguments + r.estimate.temporaries * ratio
        if id(r) not in results and total <= capacity * (1 + bound):
            fits.append(r)
    names = list(dict.fromkeys(r.machine.name for r in fits))
    queues = [_queue([r for r in fits if r.machine.name == name], layouts, results) for name in names]
    return [r for turn in itertools.zip_longest(*queues) for r in turn if r is not None]


def _queue(fits: Sequence[Ranked], layouts: Sequence[Ranked], results: dict[int, Compiled]) -> list[Ranked]:
    """Of one machine."""
    measured = {_layout_key(r) for r in layouts if id(r) in results}
    fastest = []
    for r in fits:
        if _layout_key(r) not in measured:
            measured.add(_layout_key(r))
            fastest.append(r)
    front = [r for r in _estimated_front(fits) if _layout_key(r) not in {_layout_key(f) for f in fastest[:CHUNK]}]
    mixed: list[Ranked] = []
    while (fastest or front) and len(mixed) < 16:
        turn = front if front and (len(results) + len(mixed)) % 3 == 2 else fastest or front
        row = turn.pop(0)
        if row not in mixed:
            mixed.append(row)
    return mixed


def _layout_key(row: Ranked) -> tuple[str, str]:
    """Layouts of one machine that differ by less than a thousandth in time are one to the search."""
    return row.machine.name, f"{row.seconds / max(row.rows, 1):.3e}"


def _estimated_front(rows: Sequence[Ranked]) -> list[Ranked]:
    """From the fastest on; each takes at most nine tenths of the memory of the one before."""
    front: list[Ranked] = []
    for row in sorted(rows, key=order):
        if not front or row.estimate.total < 0.9 * front[-1].estimate.total:
            front.append(row)
    return front


def _result(
    layouts: Sequence[Ranked], results: dict[int, Compiled], fitted: dict[str, Coefficients], ended: str
) -> Result:
    compiled = [Row(ranked=r, compiled=results[id(r)]) for r in layouts if id(r) in results]
    failures = [(" ".join(r.choice.words) or "as it ships", r.compiled.error) for r in compiled if r.compiled.error]  # type: ignore[union-attr]
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
    """The rows that fit and that none is as good as in both time and memory, the fastest first."""
    front: list[Row] = []
    for row in sorted(rows, key=lambda r: (r.row_seconds, r.bytes)):
        if row.compiled is not None and row.compiled.fits and (not front or row.bytes < front[-1].bytes):
            front.append(row)
    return front
