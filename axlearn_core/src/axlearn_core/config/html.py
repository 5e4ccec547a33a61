"""Self-contained HTML for notebooks: text, tables, and collapsible sections, without scripts. Does not import JAX."""

import html
from collections.abc import Iterable, Sequence

_STYLE = (
    ".axl { font: 13px/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }"
    " .axl details > :not(summary) { margin-left: 1.4em; } .axl summary { cursor: pointer; }"
    " .axl .dim, .axl .dim summary { opacity: 0.65; } .axl pre { margin: 0; white-space: pre; overflow: auto; }"
    " .axl table { border-collapse: collapse; } .axl td, .axl th { padding: 1px 12px 1px 0; text-align: left;"
    " vertical-align: top; overflow-wrap: anywhere; } .axl .added { color: #1a9c4b; } .axl .removed { color: #d1242f; }"
)


def text(value: object) -> str:
    """Escape a value for HTML, including quotes."""
    return html.escape(str(value), quote=True)


def tag(name: str, content: str, kind: str = "") -> str:
    """Return an element. `content` is HTML, and `kind` is the element's class."""
    return f'<{name} class="{text(kind)}">{content}</{name}>' if kind else f"<{name}>{content}</{name}>"


def fold(summary: str, content: str, *, is_open: bool = False, kind: str = "") -> str:
    """Return a collapsible section. `summary` and `content` are HTML."""
    attributes = (f' class="{text(kind)}"' if kind else "") + (" open" if is_open else "")
    return f"<details{attributes}><summary>{summary}</summary>{content}</details>"


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Return a table. Cells are HTML."""
    first = tag("tr", "".join(tag("th", cell) for cell in head)) if head else ""
    return tag("table", first + "".join(tag("tr", "".join(tag("td", cell) for cell in row)) for row in rows))


def fragment(content: str) -> str:
    """Return HTML with its style, for `_repr_html_`."""
    return f'<div class="axl"><style>{_STYLE}</style>{content}</div>'
