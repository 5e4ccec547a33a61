"""What a request stands for: a config, where each of its values came from, and what was decided for the user."""

from collections.abc import Mapping
from typing import Any

import attrs

from axlearn_core.config import Node, check, get
from axlearn_core.contracts.target import Machine
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.decisions import Decision
from axlearn_core.plugins.feature import Feature
from axlearn_core.plugins.registry import Registry
from axlearn_core.plugins.request import write


@attrs.frozen
class Step:
    """One change of one path: who made it, and the values before and after (`ABSENT` where there was none)."""

    set_by: str
    old: Any
    new: Any


@attrs.frozen(kw_only=True)
class Resolved:
    """A config, and where each of its values came from.

    Attributes:
        config: the tree; `REQUIRED` fields may still be unset (see `checked`).
        provenance: path (as `flatten` gives them) -> its steps, first to last; paths that were removed are kept.
        title: the name of the experiment or file.
        features: the features that were applied, in that order, with their options.
        machine: the hardware that was asked for, or that was detected and has a mesh rule.
        detected: whether the machine was detected, for which JAX has started.
        rule: who says how to lay it out there.
        notes: for people, what of the mesh rule does not fit this config and was left out.
        decisions: the machine, the mesh rule, what it changed and what it left out, and features that changed nothing.
    """

    config: Node[Any]
    provenance: Mapping[str, tuple[Step, ...]]
    title: str
    features: tuple[tuple[str, Feature], ...] = ()
    machine: Machine | None = None
    rule: str | None = None
    notes: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()
    detected: bool = False
    names: Registry = attrs.field(repr=False)

    def checked(self) -> "Resolved":
        """Itself, when nothing is missing and all values fit together; raises `ConfigError` with every problem."""
        try:
            check(self.config)
        except ConfigError as error:
            raise ConfigError(
                attrs.evolve(p, location=p.location or self.setter(p.path)) for p in error.problems
            ) from None
        return self

    def setter(self, path: str) -> str | None:
        """Who set a path last; None where it is as the experiment has it."""
        steps = self.provenance.get(path)
        return f"set by {steps[-1].set_by}" if steps and len(steps) > 1 else None

    def explain(self, path: str) -> dict[str, tuple[Step, ...]]:
        """The steps of a path; for a node, of everything below it. Raises `ConfigError` with the nearest names."""
        steps = {p: s for p, s in self.provenance.items() if not path or p == path or p.startswith(f"{path}.")}
        if not steps:
            get(self.config, path)
            inside = [p for p in self.provenance if path.startswith(f"{p}.")]  # an item of a tuple or mapping
            if not inside:
                message = "is at its default, or passed by the parent when it is built: nobody set it"
                raise ConfigError(Problem(path=path, message=message))
            steps = {p: self.provenance[p] for p in inside}
        return steps

    def to_yaml(self) -> str:
        """The config as the text of a file that `resolve` takes back."""
        return write(self.config, self.names)
