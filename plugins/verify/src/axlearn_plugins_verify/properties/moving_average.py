"""The moving average follows the parameters."""

from typing import Any, ClassVar

import jax
import numpy as np

from axlearn_core.contracts.experiment import get_learner_config
from axlearn_core.learn import Learner
from axlearn_plugins_verify.prove.contract import Difference, Outcome

STEPS = 3
ROUNDING = 1e-6
"""Relative error of an average in float32."""
TOLERANCE = 0.01
"""Largest error of an average, relative to how far it moved."""


class MovingAverage:
    """Trains for a few steps, and compares the weights for evaluation with an average computed in float64."""

    summary: ClassVar[str] = "evaluation uses the moving average of the trained parameters"

    def skip_reason(self, case: Any) -> str | None:
        """Skip learners without an average."""
        learner = get_learner_config(case.config)
        if isinstance(learner, Learner.Config) and learner.ema_decay is not None:
            return None
        return "the learner keeps no moving average"

    def check(self, case: Any) -> Outcome:
        """Compare the averages after a few steps."""
        program, decay = case.program(), get_learner_config(case.config).ema_decay
        batches = [program.put(case.batch(case.seed + i)) for i in range(STEPS)]
        train, state = program.compile("train", batches[0]), program.init(case.seed)
        average = _values(state.params)
        start = average
        for batch in batches:
            state, _ = train(state, batch)
            average = {p: decay * average[p] + (1 - decay) * x for p, x in _values(state.params).items()}
        actual = _values(program.function("weights").call(state).params)
        compared = f"the weights for evaluation after {STEPS} steps with the average of the parameters"
        worst, difference = 0.0, None
        for path, value in actual.items():
            rounding = ROUNDING * float(np.linalg.norm(average[path]))
            moved = float(np.linalg.norm(average[path] - start[path])) + rounding
            apart = max(0.0, float(np.linalg.norm(value - average[path])) - rounding)
            error = apart / moved if moved else float(apart > 0)
            worst = max(worst, error)
            if not error <= TOLERANCE and difference is None:
                difference = Difference(layer=path.rpartition(".")[0], tensor=f"average of {path}", error=error)
        return Outcome(error=worst, tolerance=TOLERANCE, compared=compared, difference=difference)


def _values(params: Any) -> dict[str, np.ndarray]:
    return {path: np.asarray(jax.device_get(x), np.float64) for path, x in params.items()}
