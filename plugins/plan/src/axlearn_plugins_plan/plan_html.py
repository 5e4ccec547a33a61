"""Format a plan as HTML for notebooks, with sections that fold."""

from collections.abc import Sequence
from html import escape

from axlearn_core.plugins.registry import registry
from axlearn_plugins_plan.plan import FunctionPlan
from axlearn_plugins_plan.remedies import Remedy, remedies
from axlearn_plugins_plan.render import batch_lines, sections, title

_OPEN = 3
"""Number of leading sections that are open: memory, remedies or time, and time or collectives."""
_PRE = "margin:0.2em 0 0.8em 1.2em;white-space:pre-wrap;font-size:90%"


def as_html(plan: FunctionPlan, fixes: Sequence[Remedy] | None = None) -> str:
    """Return self-contained HTML: a heading, and one `<details>` for each section.

    Args:
        plan: The plan.
        fixes: Changes to suggest. None computes them from the installed features.
    """
    if fixes is None:
        fixes = remedies(plan, frozenset(registry().claims["features"]))
    color = "#1a7f37" if plan.memory.fits else "#cf222e"
    lines = [f"<strong>{escape(title(plan))}</strong>", *(escape(line) for line in batch_lines(plan))]
    parts = [f'<p style="border-left:4px solid {color};padding-left:0.6em">{"<br>".join(lines)}</p>']
    for index, (heading, body) in enumerate(sections(plan, fixes, verbose=True)):
        state = " open" if index < _OPEN else ""
        content = escape("\n".join(body))
        parts.append(
            f'<details{state}><summary>{escape(heading)}</summary><pre style="{_PRE}">{content}</pre></details>'
        )
    return f"<div>{''.join(parts)}<small>compiled in {plan.compile_seconds:.1f} s</small></div>"
