"""Decisions made on behalf of the user. They are logged when a run starts and stored in its lock file."""

from collections.abc import Sequence
from typing import Literal

import attrs

from axlearn_core.config import Change


@attrs.frozen
class Decision:
    """A decision made on behalf of the user.

    Attributes:
        kind: Kind of the decision:
            `machine` and `mesh rule`: the chosen machine and mesh rule.
            `applied` and `left out`: parts of the mesh rule that were applied or skipped.
            `unchanged`: a requested feature that changed nothing.
            `replaced`: a component that a setting replaced with a plain value, or a component or setting that a feature replaced.
            `replicated`: parameters without axis names.
            `not registered`: code that the config file cannot refer to.
            `kernel`: a function that cannot use the kernel that the config names.
        subject: The machine, rule, feature, path, code, or function and op.
        reason: The reason or the changes, and how to override the decision.
    """

    kind: Literal[
        "machine",
        "mesh rule",
        "applied",
        "left out",
        "unchanged",
        "replaced",
        "replicated",
        "not registered",
        "kernel",
    ]
    subject: str
    reason: str = ""

    def __str__(self) -> str:
        indent = "    " if self.kind in ("applied", "left out") else ""
        return f"{indent}{self.kind}: {self.subject}" + (f" ({self.reason})" if self.reason else "")


def show_changes(changes: Sequence[Change], limit: int = 2) -> str:
    """Format the first `limit` changes on one line."""
    texts = [f"{c.path}: {c.old!r} -> {c.new!r}" for c in changes[:limit]]
    return "; ".join(texts) + (f"; and {len(changes) - limit} more" if len(changes) > limit else "")
