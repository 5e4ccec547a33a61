"""Microbatches give the same loss and gradients as the whole batch."""

from typing import Any, ClassVar

import attrs

from axlearn_core.config import patch
from axlearn_plugins_verify.prove.contract import Outcome
from axlearn_plugins_verify.prove.forward import check_precisely
from axlearn_plugins_verify.prove.training_step import Step, compare_steps

FIELD = "accumulate_steps"


class Microbatches:
    """Compares a step with gradient accumulation to one without. The weights of the rows differ."""

    summary: ClassVar[str] = "microbatches give the loss and the gradients of the whole batch"

    def skip_reason(self, case: Any) -> str | None:
        """Skip learners without microbatches, and models whose rows depend on each other."""
        if FIELD not in {field.name for field in attrs.fields(type(case.config.learner))}:
            return f"learner has no setting {FIELD}"
        if reasons := case.program().trained.batch_dependence:
            return f"the loss of a row depends on the other rows: {reasons[0]}"
        rows = {x.shape[0] for x in case.batch(case.seed).values() if x.ndim}
        return (
            None if all(n % _count(case.config) == 0 for n in rows) else f"batches of {min(rows)} rows cannot be split"
        )

    def check(self, case: Any) -> Outcome:
        """Compare both computations."""
        return check_precisely(case, lambda config: self._check(case, config))

    def _check(self, case: Any, base: Any) -> Outcome:
        count, batch = _count(base), case.batch(case.seed)
        one, other = (patch(base, {f"learner.{FIELD}": n}) for n in (1, count))
        return compare_steps(
            Step(program=case.program(one), weights=case.weights(one), batch=batch),
            Step(program=case.program(other), weights=case.weights(other), batch=batch),
            compared=f"loss and gradients of {count} microbatches and of one batch",
        )


def _count(config: Any) -> int:
    return max(2, getattr(config.learner, FIELD))
