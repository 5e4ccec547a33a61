"""What is decided for the user: shown when a run starts, kept in its lock."""

from collections.abc import Sequence
from typing import Literal

import attrs

from axlearn_core.config import Change


@attrs.frozen
class Decision:
    """One decision.

    Attributes:
        kind: `machine` and `mesh rule` say what holds; `applied` and `left out` what the rule changed and did not change;
            `unchanged` names a feature that was asked for and changed nothing, `replicated` parameters without axis names,
            `not registered` code that the config file cannot name, `kernel` a function that cannot use the kernel that the
            config names.
        subject: the machine, the rule, the feature, the path, the code, or the function and its op.
        reason: why, or what it changed, and what to ask for to have it otherwise.
    """

    kind: Literal["machine", "mesh rule", "applied", "left out", "unchanged", "replicated", "not registered", "kernel"]
    subject: str
    reason: str = ""

    def __str__(self) -> str:
        indent = "    " if self.kind in ("applied", "left out") else ""
        return f"{indent}{self.kind}: {self.subject}" + (f" ({self.reason})" if self.reason else "")


def show_changes(changes: Sequence[Change], limit: int = 2) -> str:
    """The first few changes on one line."""
    texts = [f"{c.path}: {c.old!r} -> {c.new!r}" for c in changes[:limit]]
    return "; ".join(texts) + (f"; and {len(changes) - limit} more" if len(changes) > limit else "")
