"""Causality: a later token never changes an earlier logit."""

from typing import Any, ClassVar

import numpy as np

from axlearn_core.compose import Program
from axlearn_core.config import walk
from axlearn_plugins_verify.prove.contract import Outcome
from axlearn_plugins_verify.prove.forward import (
    Run,
    all_in_prefix,
    check_precisely,
    compare_logits,
    competing_tokens,
    logits_tolerance,
    missing_logits,
    model_weights,
    prefix_length,
    random_rows,
)


class Causality:
    """Replaces the tokens after a position, which differs from row to row, and compares the logits before it.

    The tokens of a prefix, which attend to one another in both directions, stay.
    """

    summary: ClassVar[str] = "a later token never changes an earlier logit"

    def skip_reason(self, case: Any) -> str | None:
        """Skip models without logits per token, and bidirectional models."""
        return missing_logits(case) or bidirectional(case) or competing_tokens(case) or all_in_prefix(case)

    def check(self, case: Any) -> Outcome:
        """Compare the logits of rows that differ only in later tokens."""
        return check_precisely(case, lambda config: self._check(case, case.program(config)))

    def _check(self, case: Any, program: Program) -> Outcome:
        tokens, others = random_rows(case, 1), random_rows(case, 2)
        rows, length = tokens.shape
        starts = np.maximum(1 + np.arange(rows) * (length - 1) // rows, prefix_length(case))
        earlier = np.arange(length)[None] < starts[:, None]
        weights = model_weights(case, program)

        def select(x: np.ndarray) -> np.ndarray:
            return x[earlier]

        one = Run(program=program, weights=weights, rows={"tokens": tokens}, select=select)
        other = Run(program=program, weights=weights, rows={"tokens": np.where(earlier, tokens, others)}, select=select)
        return compare_logits(
            one,
            other,
            tolerance=logits_tolerance(case, program, one.rows),
            compared=f"logits before the first of {length - int(starts[0])} to {length - int(starts[-1])} other tokens",
        )


def bidirectional(case: Any) -> str | None:
    """Return which part of the model attends to later tokens, or None."""
    for path, value in walk(case.config.model):
        if path.rpartition(".")[2] == "causal" and value is False:
            return f"the model is bidirectional: model.{path} is False"
    return None
