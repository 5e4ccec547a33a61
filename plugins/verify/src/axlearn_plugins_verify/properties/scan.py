"""Scanned stacks compute what unrolled stacks compute."""

from typing import Any, ClassVar

from axlearn_core.config import find, patch
from axlearn_core.config.roles import StackRole
from axlearn_plugins_verify.prove.contract import Outcome
from axlearn_plugins_verify.prove.forward import check_precisely
from axlearn_plugins_verify.prove.training_step import Step, compare_steps

OTHER = {"scan": "unrolled", "unrolled": "scan"}


class Scan:
    """Compares a step to one in which scanned stacks are unrolled, and unrolled stacks are scanned."""

    summary: ClassVar[str] = "a scan over the layers gives the loss and the gradients of unrolled layers"

    def skip_reason(self, case: Any) -> str | None:
        """Skip models without a stack."""
        return None if find(case.config.model, StackRole) else "the model has no stack of layers"

    def check(self, case: Any) -> Outcome:
        """Compare both modes."""
        return check_precisely(case, lambda config: self._check(case, config))

    def _check(self, case: Any, base: Any) -> Outcome:
        stacks = find(base.model, StackRole)
        other = patch(base, {f"model.{path}.mode": OTHER[stack.mode] for path, stack in stacks.items()})
        steps = [
            Step(program=case.program(config), weights=case.weights(config), batch=case.batch(case.seed))
            for config in (base, other)
        ]
        if any(stack.mode == "scan" for stack in stacks.values()):
            steps.reverse()  # unrolled layers are correct by assumption
        modes = ", ".join(f"model.{path} in the modes scan and unrolled" for path in stacks)
        return compare_steps(*steps, compared=modes)
