"""Rematerialization does not change results."""

from typing import Any, ClassVar

from axlearn_core.config import find, patch
from axlearn_core.config.roles import StackRole
from axlearn_core.nn.remat import Remat
from axlearn_plugins_verify.prove.contract import Outcome
from axlearn_plugins_verify.prove.forward import check_precisely
from axlearn_plugins_verify.prove.training_step import Step, compare_steps


class Rematerialization:
    """Compares a step to one without rematerialization. If the config has none, full rematerialization is compared."""

    summary: ClassVar[str] = "rematerialization does not change the loss and the gradients"

    def skip_reason(self, case: Any) -> str | None:
        """Skip models without a stack."""
        return None if find(case.config.model, StackRole) else "the model has no stack of layers"

    def check(self, case: Any) -> Outcome:
        """Compare with and without rematerialization."""
        return check_precisely(case, lambda config: self._check(case, config))

    def _check(self, case: Any, base: Any) -> Outcome:
        stacks = find(base.model, StackRole)
        without = patch(base, {f"model.{path}.remat": None for path in stacks})
        used = any(stack.remat is not None for stack in stacks.values())
        full = patch(base, {f"model.{path}.remat": Remat.Config() for path in stacks})
        one, other = (
            Step(program=case.program(config), weights=case.weights(config), batch=case.batch(case.seed))
            for config in (without, base if used else full)
        )
        kind = "the config's policy" if used else "full rematerialization, which the config does not use,"
        return compare_steps(one, other, compared=f"{kind} and none")
