"""Draw the differences between two configs: the node tree of the second config, with changed nodes in green."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import attrs

from axlearn_core.config import Change, Node
from axlearn_core.config.tree import children, join
from axlearn_plugins_tools.reporting.charts import text

_BOLD = ' style="font-weight: 600"'
_ROW, _COLUMN, _LINE, _LETTER, _PAD = 20, 56, 15, 6.9, 9


@attrs.define(eq=False)
class _Box:
    """A node of the tree."""

    path: str
    label: str
    changes: list[str] = attrs.field(factory=list)
    below: "list[_Box]" = attrs.field(factory=list)
    x: float = 0
    y: float = 0

    @property
    def lines(self) -> Sequence[str]:
        return (self.label, *self.changes)

    @property
    def width(self) -> float:
        return max(map(len, self.lines)) * _LETTER + 2 * _PAD

    @property
    def height(self) -> float:
        return len(self.lines) * _LINE + 6

    def all(self) -> "Iterable[_Box]":
        yield self
        for box in self.below:
            yield from box.all()


def render_diff(
    title: str, config: Node[Any], changes: Sequence[Change], get_name: Callable[[Any], str], show: Callable[[Any], str]
) -> str:
    """Return an HTML page with the tree of `config`.

    Args:
        title: Heading.
        config: The second of the two configs.
        changes: Differences from the first config, from `axlearn_core.config.diff`.
        get_name: Returns the name of a node type, as in files.
        show: Formats a value.
    """
    root = _boxes(config, "", "", get_name)
    index = {box.path: box for box in root.all()}
    for change in changes:
        owner = change.path.rpartition(".")[0]
        while owner not in index:
            owner = owner.rpartition(".")[0]
        name = change.path.removeprefix(f"{owner}.") if owner else change.path
        if (line := _describe_change(name, change, show)) not in index[owner].changes:
            index[owner].changes.append(line)
    _place_boxes(root)
    boxes = list(root.all())
    width = max(b.x + b.width for b in boxes) + 2
    height = max(b.y + b.height for b in boxes) + 2
    drawn = "".join(_edges(box) for box in boxes) + "".join(map(_draw_box, boxes))
    changed = sum(bool(b.changes) for b in boxes)
    style = files("axlearn_plugins_tools.reporting").joinpath("style.css").read_text()
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title><style>{style}'
        ".picture { overflow: auto; } .picture svg { width: auto; } .picture text { font: 11.5px ui-monospace, Menlo,"
        " Consolas, monospace; fill: var(--ink); } .box { fill: var(--card); stroke: var(--rule); }"
        " .changed .box { fill: #d7f5df; stroke: #1a9c4b; stroke-width: 1.5; } .changed text { fill: #0b3d1e; }"
        " .edge { fill: none; stroke: var(--dim); opacity: 0.45; stroke-width: 1.5; }</style></head><body><main"
        f' style="max-width: none"><header><h1>{text(title)}</h1><p class="sub">{changed} of {len(boxes)} nodes'
        f" differ, in {len(changes)} values. They are green.</p></header><section class='picture'>"
        f'<svg width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" role="img">{drawn}</svg>'
        "</section></main></body></html>\n"
    )


def _boxes(value: Any, path: str, name: str, get_name: Callable[[Any], str]) -> _Box:
    box = _Box(path, f"{name}: {get_name(type(value))}" if name else get_name(type(value)))
    box.below = [_boxes(node, child_path, label, get_name) for child_path, label, node in _nodes_below(value, path, "")]
    return box


def _nodes_below(value: Any, path: str, label: str) -> Iterable[tuple[str, str, Node[Any]]]:
    """Yield the nearest nodes below a value, through tuples and mappings."""
    for name, child in children(value).items():
        child_path, label_path = join(path, name), join(label, name)
        if isinstance(child, Node):
            yield child_path, label_path, child
        elif isinstance(child, (tuple, Mapping)):
            yield from _nodes_below(child, child_path, label_path)


def _describe_change(name: str, change: Change, show: Callable[[Any], str]) -> str:
    if change.kind == "removed":  # for a removed node, only show its name
        line = f"- {name}: {show(change.old)}" if "." not in name else f"- {name.partition('.')[0]}"
    else:
        line = f"{name} = {show(change.new)}" + (f" (was {show(change.old)})" if change.kind == "changed" else "")
    return line if len(line) <= 64 else line[:61] + "..."


def _place_boxes(root: _Box) -> None:
    """Place boxes from left to right by depth. Each parent is vertically centered on its children."""
    columns: dict[int, float] = {}

    def measure(box: _Box, depth: int) -> None:
        columns[depth] = max(columns.get(depth, 0), box.width)
        for child in box.below:
            measure(child, depth + 1)

    measure(root, 0)
    lefts, x = [], 1.0
    for depth in sorted(columns):
        lefts.append(x)
        x += columns[depth] + _COLUMN
    bottoms = [0.0] * len(lefts)

    def place(box: _Box, depth: int, top: float) -> float:
        """Place the box and its descendants at or below `top`. Return their bottom."""
        box.x, bottom = lefts[depth], max(top, bottoms[depth])
        for child in box.below:
            bottom = place(child, depth + 1, bottom)
        middle = (box.below[0].y + box.below[-1].y + box.below[-1].height) / 2 if box.below else 0
        box.y = max(top, bottoms[depth], middle - box.height / 2) if box.below else max(top, bottoms[depth])
        bottoms[depth] = box.y + box.height + _ROW / 2
        return max(bottom, bottoms[depth])

    place(root, 0, 1.0)


def _edges(box: _Box) -> str:
    x, y = box.x + box.width, box.y + box.height / 2
    ends = ((child.x, child.y + child.height / 2) for child in box.below)
    return "".join(
        f'<path class="edge" d="M{x:.0f} {y:.1f} C{(x + a) / 2:.0f} {y:.1f} {(x + a) / 2:.0f} {b:.1f} {a:.0f} {b:.1f}"/>'
        for a, b in ends
    )


def _draw_box(box: _Box) -> str:
    rows = "".join(
        f'<text x="{box.x + _PAD:.0f}" y="{box.y + 4 + _LINE * (i + 0.75):.1f}"'
        f"{_BOLD if i == 0 else ''}>{text(line)}</text>"
        for i, line in enumerate(box.lines)
    )
    return (
        f'<g class="{"changed" if box.changes else "same"}"><title>{text(box.path or "the root")}</title>'
        f'<rect class="box" x="{box.x:.0f}" y="{box.y:.1f}" width="{box.width:.0f}" height="{box.height:.0f}" rx="5"/>'
        f"{rows}</g>"
    )
