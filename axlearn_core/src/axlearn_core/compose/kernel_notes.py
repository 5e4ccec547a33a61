"""Reports the calls that run by another kernel than the one that the config names."""

import sys
from collections.abc import Callable, Sequence

import jax

from axlearn_core.kernels.selection import Choice
from axlearn_core.plugins.decisions import Decision


def print_decision(decision: Decision) -> None:
    """Prints a decision on standard error, from the first process only."""
    if jax.process_index() == 0:
        print(decision, file=sys.stderr, flush=True)


class KernelNotes:
    """Tells `listener` once of each function, op and reason for which a named kernel was passed over.

    Attributes:
        listener: takes the decisions; by default they are printed.
    """

    def __init__(self) -> None:
        self.listener: Callable[[Decision], None] = print_decision
        self._reported: set[Decision] = set()

    def report(self, function: str, choices: Sequence[Choice]) -> None:
        """Reports those of a function's choices that are new."""
        for decision in replaced_kernels(function, choices):
            if decision not in self._reported:
                self._reported.add(decision)
                self.listener(decision)


def replaced_kernels(function: str, choices: Sequence[Choice]) -> list[Decision]:
    """The decisions to run a call of `function` by another kernel than the one that the config names."""
    replaced = [choice for choice in choices if choice.named not in (None, choice.name)]
    decisions = [
        Decision(
            "kernel",
            f"{function}: {choice.op.name} runs by {choice.name}, not by {choice.named}",
            choice.rejected[choice.named or ""],
        )
        for choice in replaced
    ]
    return list(dict.fromkeys(decisions))
