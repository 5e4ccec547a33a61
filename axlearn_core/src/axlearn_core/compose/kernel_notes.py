"""Report calls that do not use the kernel that the config names."""

import sys
from collections.abc import Callable, Sequence

import jax

from axlearn_core.kernels.selection import Choice
from axlearn_core.plugins.decisions import Decision


def print_decision(decision: Decision) -> None:
    """Print a decision to standard error, on process 0 only."""
    if jax.process_index() == 0:
        print(decision, file=sys.stderr, flush=True)


class KernelNotes:
    """Reports each replaced kernel once per function, op, and reason.

    Attributes:
        listener: Receives the decisions. By default, they are printed.
    """

    def __init__(self) -> None:
        self.listener: Callable[[Decision], None] = print_decision
        self._reported: set[Decision] = set()

    def report(self, function: str, choices: Sequence[Choice]) -> None:
        """Report new kernel choices for a function."""
        for decision in replaced_kernels(function, choices):
            if decision not in self._reported:
                self._reported.add(decision)
                self.listener(decision)


def replaced_kernels(function: str, choices: Sequence[Choice]) -> list[Decision]:
    """Return the decisions to use a kernel other than the one that the config names."""
    replaced = [choice for choice in choices if choice.named not in (None, choice.name)]
    decisions = [
        Decision(
            "kernel",
            f"{function}: {choice.op.name} uses {choice.name} instead of {choice.named}",
            choice.rejected[choice.named or ""],
        )
        for choice in replaced
    ]
    return list(dict.fromkeys(decisions))
