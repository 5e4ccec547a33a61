"""Line charts and histograms as inline SVG. They show values on hover with CSS and need no scripts."""

import html
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from axlearn_core.train.trackers import printable

WIDTH = 960
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 24, 26
_DRAWN, _HOVERED = 600, 90  # maximum number of points to draw, and of hover columns


@attrs.frozen(kw_only=True)
class Series:
    """One line of a chart.

    Attributes:
        label: Name in the legend.
        style: CSS class (`raw`, `main`, `second`).
        points: Pairs of x and y, ordered by x.
        dots: Whether to draw a dot at each point.
    """

    label: str
    style: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


def text(value: Any) -> str:
    """Escape a value for HTML."""
    return html.escape(printable(str(value)))


def short(value: float) -> str:
    """Format a number with few characters: 1.385, 12.3k, 2.6M, 3e-04."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}" if size >= 1e-3 or not value else f"{value:.1e}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers within [low, high]."""
    raw = (high - low) / count
    if not raw > 0 or not math.isfinite(raw):
        return [low]
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(f * unit for f in (1, 2, 2.5, 5, 10) if f * unit >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers within [low, high] that are about evenly spaced on a log axis."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [v for d in decades for m in (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if low <= (v := m * 10.0**d) <= high]
    ticks = values[:1]
    for v in values:
        if math.log(v / ticks[-1]) >= math.log(high / low) / 9:
            ticks.append(v)
    return ticks


def smooth(values: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """Return the mean over about `window` points around each point. The mean does not lag.

    Near the start, the window shrinks symmetrically, because a loss is steep there. At the end, it is truncated.
    """
    sums = [0.0, *itertools.accumulate(y for _, y in values)]
    result = []
    for i, (x, _) in enumerate(values):
        before = min(window // 2, i)
        end = min(i + before + 1, len(values))
        result.append((x, (sums[end] - sums[i - before]) / (end - i + before)))
    return result


def thin(values: Sequence[tuple[float, float]], limit: int = _DRAWN) -> list[tuple[float, float]]:
    """Return at most about `limit` points, including the minimum and maximum of each interval."""
    if len(values) <= limit:
        return list(values)
    size = math.ceil(2 * len(values) / limit)
    result = []
    for i in range(0, len(values), size):
        stretch = values[i : i + size]
        pair = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        result += sorted(pair)
    return result


class _Frame:
    """Maps data to pixels and draws the grid and labels.

    Args:
        x: Range of x.
        y: Range of y.
        width: Width in pixels.
        height: Height in pixels.
        log: Use a logarithmic y axis.
    """

    def __init__(
        self, x: tuple[float, float], y: tuple[float, float], width: int, height: int, *, log: bool = False
    ) -> None:
        (self.x0, self.x1), (self.y0, self.y1) = _widen(x), _widen(y)
        self.scale = math.log if log else float
        self.y_ticks = log_ticks(self.y0, self.y1) if log else ticks(self.y0, self.y1, height // 45)
        self.width, self.height, self.right, self.bottom = width, height, width - _RIGHT, height - _BOTTOM

    def x(self, value: float) -> float:
        return round(_LEFT + (value - self.x0) / (self.x1 - self.x0) * (self.right - _LEFT), 1)

    def y(self, value: float) -> float:
        low, high = self.scale(self.y0), self.scale(self.y1)
        return round(self.bottom - (self.scale(value) - low) / (high - low) * (self.bottom - _TOP), 1)

    def grid(self, show_x: Callable[[float], str], show_y: Callable[[float], str]) -> list[str]:
        parts = []
        for v in self.y_ticks:
            y = self.y(v)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{self.right}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{text(show_y(v))}</text>')
        for v in ticks(self.x0, self.x1, self.width // 95):
            parts.append(f'<text x="{self.x(v)}" y="{self.height - 7}" text-anchor="middle">{show_x(v)}</text>')
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{self.right}" y1="{self.bottom}" y2="{self.bottom}"/>')
        return parts

    def svg(self, title: str, parts: Sequence[str]) -> str:
        head = f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{text(title)}">'
        return "".join((head, *parts, "</svg>"))


def _widen(pair: tuple[float, float]) -> tuple[float, float]:
    low, high = pair
    return pair if high > low else (low - (abs(low) * 0.1 or 1.0), high + (abs(high) * 0.1 or 1.0))


def line_chart(title: str, series: Sequence[Series], *, width: int = WIDTH, height: int, log: bool = False) -> str:
    """Return a chart of lines over steps, or an empty string if there are no points.

    The chart has a legend if there is more than one line.
    """
    series = [s for s in series if s.points]
    if not series:
        return ""
    xs, ys = [p[0] for s in series for p in s.points], [p[1] for s in series for p in s.points]
    log = log and min(ys) > 0
    margin = 0.0 if log else 0.04 * (max(ys) - min(ys))
    frame = _Frame((min(xs), max(xs)), (min(ys) - margin, max(ys) + margin), width, height, log=log)
    parts = frame.grid(lambda v: f"{v:,.6g}", short)
    for s in series:
        drawn = " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in thin(s.points))
        parts.append(f'<polyline class="line {s.style}" points="{drawn}"/>')
        if s.dots or len(s.points) == 1:
            points = thin(s.points, 80)
            parts += [f'<circle class="{s.style}" cx="{frame.x(x)}" cy="{frame.y(y)}" r="3"/>' for x, y in points]
    parts += _hover(frame, series)
    keys = "".join(f'<span class="key {s.style}">{text(s.label)}</span>' for s in series)
    keys += "<span>logarithmic scale</span>" if log else ""
    legend = f'<div class="legend">{keys}</div>' if len(series) > 1 or log else ""
    return legend + frame.svg(title, parts)


def _hover(frame: _Frame, series: Sequence[Series]) -> list[str]:
    """Return invisible columns that show the step and values under the mouse pointer."""
    tables = [(s, dict(s.points)) for s in series]
    every = sorted({x for s in series for x in (p[0] for p in s.points)})
    marked = {x for s in series if s.dots for x, _ in thin(s.points, 60)}
    positions = sorted(set(every[:: math.ceil(len(every) / _HOVERED)]) | {every[-1]} | marked)
    edges = [_LEFT, *((frame.x(a) + frame.x(b)) / 2 for a, b in itertools.pairwise(positions)), frame.right]
    parts = []
    for i, x in enumerate(positions):
        values = [(s, t[x]) for s, t in tables if x in t]
        center = frame.x(x)
        words = "   ".join([f"step {x:,.0f}", *(f"{text(s.label)} {short(y)}" for s, y in values)])
        dots = "".join(f'<circle class="{s.style}" cx="{center}" cy="{frame.y(y)}" r="3.5"/>' for s, y in values)
        left_edge, width = edges[i], edges[i + 1] - edges[i]
        parts.append(
            f'<g class="hit"><rect x="{left_edge:.1f}" y="0" width="{width:.1f}" height="{frame.height}"/>'
            f'<g class="tip"><line x1="{center}" x2="{center}" y1="{_TOP}" y2="{frame.bottom}"/>{dots}'
            f'<text x="{frame.right}" y="14" text-anchor="end" xml:space="preserve">{words}</text></g></g>'
        )
    return parts


def histogram(
    title: str, values: Sequence[float], marks: Sequence[tuple[str, float]], show: Callable[[float], str]
) -> str:
    """Return a histogram that spans the minimum to the highest mark, with a line at each mark."""
    low, high = _widen((min(values), max(v for _, v in marks)))
    bins = min(40, max(8, round(math.sqrt(len(values)))))
    counts = [0] * bins
    for v in values:
        if v <= high:
            counts[min(int((v - low) / (high - low) * bins), bins - 1)] += 1
    frame = _Frame((low, high), (0, max(counts) * 1.05), WIDTH, 190)
    parts = frame.grid(show, short)
    for i, count in enumerate(counts):
        a, b = (low + (high - low) * k / bins for k in (i, i + 1))
        x, y = frame.x(a), frame.y(count)
        parts.append(
            f'<rect class="bar" x="{x + 0.5}" y="{y}" width="{max(frame.x(b) - x - 1, 1):.1f}" '
            f'height="{frame.bottom - y:.1f}"><title>{show(a)} to {show(b)}: {count}</title></rect>'
        )
    for label, v in marks:
        x = frame.x(v)
        parts.append(f'<line class="mark" x1="{x}" x2="{x}" y1="{_TOP}" y2="{frame.bottom}"/>')
        parts.append(f'<text x="{x}" y="{_TOP - 6}" text-anchor="middle">{text(label)}</text>')
    return frame.svg(title, parts)
