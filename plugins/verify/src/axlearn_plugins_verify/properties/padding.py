"""Padding does not change the results."""

from typing import Any, ClassVar

import attrs
import numpy as np

from axlearn_plugins_verify.prove.contract import Outcome
from axlearn_plugins_verify.prove.forward import check_precisely
from axlearn_plugins_verify.prove.training_step import Step, compare_steps

WEIGHTS, SEGMENTS, POSITIONS = "weights", "segment_ids", "positions"


class Padding:
    """Pads the second half of each row, with different tokens, and compares the steps. Then compares with shorter rows.

    The second comparison needs a model that draws no random numbers, because the numbers depend on the length of the rows.
    """

    summary: ClassVar[str] = "padding changes neither the loss nor the gradients"

    def skip_reason(self, case: Any) -> str | None:
        """Skip batches without weights."""
        if not any(name.endswith(WEIGHTS) and x.ndim == 2 for name, x in case.batch(case.seed).items()):
            return "rows have no padding: batches have no `weights` per token"
        return None

    def check(self, case: Any) -> Outcome:
        """Compare with different padding, then with none."""
        return check_precisely(case, lambda config: self._check(case, config))

    def _check(self, case: Any, config: Any) -> Outcome:
        program, weights = case.program(config), case.weights(config)
        batch, others = case.batch(case.seed), case.batch(case.seed + 1)
        length = next(x.shape[1] for name, x in batch.items() if name.endswith(WEIGHTS))
        size = length // 2
        padded = {name: _pad(name, x, x, size) for name, x in batch.items()}
        filled = {name: _pad(name, x, others[name], size) for name, x in batch.items()}
        one = Step(program=program, weights=weights, batch=padded, select=lambda x: x[:, :size])
        compared = f"{length - size} padded tokens per row with other tokens"
        outcome = compare_steps(one, attrs.evolve(one, batch=filled), compared=compared)
        if not outcome.holds or program.trained.is_stateful:
            return outcome
        cut = {n: x[:, :size] if x.ndim >= 2 and x.shape[1] == length else x for n, x in batch.items()}
        short = attrs.evolve(one, batch=cut, select=lambda x: x)
        shorter = compare_steps(short, one, compared=f"{compared}, and rows of {size} tokens without padding")
        return (
            shorter
            if not shorter.holds or shorter.error >= outcome.error
            else attrs.evolve(outcome, compared=shorter.compared)
        )


def _pad(name: str, values: np.ndarray, padding: np.ndarray, size: int) -> np.ndarray:
    """Turn the tokens from `size` on into padding with the given values."""
    if values.ndim < 2 or values.shape[1] <= size:
        return values
    result = values.copy()
    zero = name.endswith((WEIGHTS, SEGMENTS, POSITIONS))
    result[:, size:] = 0 if zero else padding[:, size:]
    return result
