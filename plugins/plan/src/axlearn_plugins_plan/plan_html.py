"""Format a plan as HTML for notebooks, with collapsible sections."""

from collections.abc import Sequence

from axlearn_core.config.html import fold, fragment, tag, text
from axlearn_core.plugins.registry import registry
from axlearn_plugins_plan.plan import FunctionPlan
from axlearn_plugins_plan.remedies import Remedy, remedies
from axlearn_plugins_plan.render import batch_lines, sections, title

_OPEN = 3
"""Number of leading sections that start open: memory, remedies or time, and time or collectives."""


def as_html(plan: FunctionPlan, fixes: Sequence[Remedy] | None = None) -> str:
    """Return self-contained HTML: a heading, and one `<details>` for each section.

    Args:
        plan: The plan.
        fixes: Changes to suggest. If None, they are computed from the installed features.
    """
    if fixes is None:
        fixes = remedies(plan, frozenset(registry().claims["features"]))
    heading = tag("b", text(title(plan)), "" if plan.memory.fits else "removed")
    parts = ["<br>".join([heading, *(text(line) for line in batch_lines(plan))])]
    for index, (section, lines) in enumerate(sections(plan, fixes, verbose=True)):
        parts.append(fold(text(section), tag("pre", text("\n".join(lines))), is_open=index < _OPEN))
    return fragment("".join(parts) + tag("small", f"compiled in {plan.compile_seconds:.1f} s"))
