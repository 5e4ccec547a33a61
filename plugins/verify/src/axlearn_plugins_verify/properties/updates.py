"""Training updates every parameter that is not frozen."""

from typing import Any, ClassVar

import jax
import numpy as np

from axlearn_plugins_verify.prove.contract import Difference, Outcome

STEPS = 2
"""Steps to train. An adapter whose second half starts at zero updates its first half in the second step."""


class Updates:
    """Trains for two steps, and compares each parameter with its initial value."""

    summary: ClassVar[str] = "training changes every parameter that is not frozen by name, and no other"

    def skip_reason(self, case: Any) -> str | None:
        """Always check."""
        return None

    def check(self, case: Any) -> Outcome:
        """Compare the parameters before and after."""
        program = case.program()
        batches = [program.put(case.batch(case.seed + i)) for i in range(STEPS)]
        train, state = program.compile("train", batches[0]), program.init(case.seed)
        before = {path: np.asarray(jax.device_get(x)) for path, x in state.params.items()}
        for batch in batches:
            state, _ = train(state, batch)
        frozen = set(program.function("train").frozen)
        wrong = [p for p, x in state.params.items() if np.array_equal(before[p], np.asarray(x)) != (p in frozen)]
        difference = None
        if wrong:
            detail = "is frozen, but changed" if wrong[0] in frozen else f"did not change in {STEPS} steps"
            more = f"; {len(wrong)} parameters are wrong" if len(wrong) > 1 else ""
            layer = wrong[0].rpartition(".")[0]
            difference = Difference(layer=layer, tensor=wrong[0], error=1.0, detail=f"{detail}{more}")
        compared = (
            f"{len(before) - len(frozen)} trained and {len(frozen)} frozen parameters before and after {STEPS} steps"
        )
        return Outcome(error=float(bool(wrong)), tolerance=0.0, compared=compared, difference=difference)
