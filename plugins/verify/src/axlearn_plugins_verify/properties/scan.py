"""Scanned stacks compute what unrolled stacks compute."""

from typing import Any, ClassVar

from axlearn_core.config import find, get, patch, walk
from axlearn_core.config.roles import StackRole
from axlearn_plugins_verify.prove.contract import Outcome
from axlearn_plugins_verify.prove.forward import check_precisely
from axlearn_plugins_verify.prove.training_step import Step, compare_steps

OTHER = {"scan": "unrolled", "unrolled": "scan"}


class Scan:
    """Compares a step to one in which scanned stacks are unrolled, and unrolled stacks are scanned.

    If a stack alternates kinds of layers, it gets more layers than the shrunk config has, because one period is not scanned.
    """

    summary: ClassVar[str] = "a scan over the layers gives the loss and the gradients of unrolled layers"

    def skip_reason(self, case: Any) -> str | None:
        """Skip models without a stack."""
        return None if find(case.config.model, StackRole) else "the model has no stack of layers"

    def check(self, case: Any) -> Outcome:
        """Compare both modes."""
        return check_precisely(case, lambda config: self._check(case, config))

    def _check(self, case: Any, base: Any) -> Outcome:
        base = with_periods(base, case.original)
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


def with_periods(config: Any, original: Any) -> Any:
    """Return the config with two periods of each stack that alternates kinds of layers, if the original has that many layers."""
    counts: dict[str, int] = {}
    for path, value in walk(config.model):
        owner, _, name = path.rpartition(".")
        if name != "num_layers" or not isinstance(value, int):
            continue
        if any(inner.rpartition(".")[2] == "children" for inner, _ in walk(get(config.model, owner))):
            counts[f"model.{path}"] = max(value, min(2 * value, get(original, f"model.{path}")))
    return patch(config, counts) if counts else config
