"""Microbatches give the loss and the gradients of the batch."""

from typing import Any, ClassVar

from axlearn_core.config import patch
from axlearn_core.config.tree import children
from axlearn_core.contracts.experiment import get_learner_config
from axlearn_plugins_verify.prove.contract import Outcome
from axlearn_plugins_verify.prove.forward import check_precisely
from axlearn_plugins_verify.prove.step import Step, compare_steps

STEPS = "accumulate_steps"


class Microbatches:
    """Compares a step in microbatches to a step with the whole batch."""

    summary: ClassVar[str] = "microbatches give the loss and the gradients of the batch"

    def skip_reason(self, case: Any) -> str | None:
        """Skip models whose rows depend on each other, and learners without microbatches."""
        if STEPS not in children(get_learner_config(case.config)):
            return f"the learner has no `{STEPS}`"
        reasons = case.program().trained.batch_dependence
        return f"the microbatches differ from the batch: {reasons[0]}" if reasons else None

    def check(self, case: Any) -> Outcome:
        """Compare the microbatches to the batch."""
        return check_precisely(case, lambda config: self._check(case, config))

    def _check(self, case: Any, config: Any) -> Outcome:
        count = max(2, get_learner_config(config).accumulate_steps)
        one, other = (
            Step(program=case.program(c), weights=case.weights(c), batch=case.batch(case.seed))
            for c in (patch(config, {f"learner.{STEPS}": n}) for n in (1, count))
        )
        return compare_steps(one, other, compared=f"{count} microbatches and the batch")
