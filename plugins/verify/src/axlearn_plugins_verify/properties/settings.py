"""Every setting of the model has an effect."""

import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import attrs
import jax

from axlearn_core.compose import ModelAndObjective, Program
from axlearn_core.config import Node, Scaled, find, get, patch
from axlearn_core.config.flat import leaves
from axlearn_core.errors import AxlearnError
from axlearn_core.kernels.selection import Selection
from axlearn_plugins_transformer.alternate import Alternate
from axlearn_plugins_verify.prove.contract import Difference, Outcome
from axlearn_plugins_verify.prove.reuse import reuse
from axlearn_plugins_verify.prove.structure import abstract_batch

PARTS = ("model.", "objective.")
KINDS = ("mathematics", "training")


class Settings:
    """Changes each number and flag of the model that differs from its default, and compares the programs.

    A program that does not change ignores the setting. For example, an attention layer may not pass on its soft cap, or one
    feature may undo the effect of another.
    """

    summary: ClassVar[str] = "every setting of the model that differs from its default has an effect"

    def skip_reason(self, case: Any) -> str | None:
        """Skip models whose settings all have their default values."""
        return None if any(changed_settings(case.config)) else "all settings of the model have their default values"

    def check(self, case: Any) -> Outcome:
        """Compare the program of each changed setting to that of the config."""
        count, ignored = 0, []
        for path, config in changed_settings(case.config):
            count += 1
            if not self._has_effect(case, path, config):
                ignored.append(path)
        difference = None
        if ignored:
            layer, _, name = ignored[0].removeprefix("model.").rpartition(".")
            more = f"; also {', '.join(ignored[1:])}" if len(ignored) > 1 else ""
            detail = f"{ignored[0]}={get(case.config, ignored[0])!r} has no effect{more}"
            difference = Difference(layer=layer, tensor=name, error=1.0, detail=detail)
        return Outcome(
            error=float(bool(ignored)),
            tolerance=0.0,
            compared=f"programs with {count} changed settings",
            difference=difference,
        )

    def _has_effect(self, case: Any, path: str, config: Any) -> bool:
        """Return whether a setting has an effect, for any seed."""
        return reuse(
            case.program(),
            ("setting", path),
            lambda: _differs(case, case.config, config) or self._differs_before_shrinking(case, path),
        )

    def _differs_before_shrinking(self, case: Any, path: str) -> bool:
        """Return whether a setting has an effect before the config is shrunk. The sizes of the shrunk config may hide it."""
        changed = next(
            (config for other, config in changed_settings(case.original, repeated=True) if other == path), None
        )
        return changed is None or _differs(case, case.original, changed)


def changed_settings(config: Any, *, repeated: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the path of each number and flag that differs from its default, and the config with a different value.

    Args:
        config: A `Trainer.Config`.
        repeated: Whether to yield the settings of a node of an `alternate` that equals an earlier one.
    """
    left_out = () if repeated else tuple(_repeated_nodes(config))
    for leaf in leaves(config):
        if not leaf.path.startswith(PARTS) or leaf.kind not in KINDS or _is_default(config, leaf.path):
            continue
        if leaf.path.startswith(left_out):
            continue
        for value in _other_values(leaf.value):
            try:
                yield leaf.path, patch(config, {leaf.path: value})
            except AxlearnError:
                continue
            break


def _repeated_nodes(config: Any) -> Iterator[str]:
    """Yield the path, with a dot at its end, of each node of an `alternate` that equals an earlier one."""
    for path, slot in find(config.model, Alternate).items():
        nodes: set[Any] = set()
        groups = {"first": slot.first, "children": slot.children}
        for name, node in ((f"{group}.{i}", n) for group, members in groups.items() for i, n in enumerate(members)):
            if node in nodes:
                yield f"model.{path}.{name}."
            nodes.add(node)


def _other_values(value: Any) -> tuple[Any, ...]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return tuple(other for other in (2 * value, value + 1, value - 1) if other != value)
    return (value * 1.25, value * 0.75) if isinstance(value, float) and value else ()


def _is_default(config: Any, path: str) -> bool:
    """Return whether a setting has its default value, or is not a setting in its own right."""
    parent, _, name = path.rpartition(".")
    node = get(config, parent)
    if isinstance(node, Scaled):
        return True  # rounding may hide a change in a relative size
    fields = {f.name: f for f in attrs.fields(type(node))} if isinstance(node, Node) else {}
    return name not in fields or fields[name].default == get(config, path)


def _differs(case: Any, config: Any, other: Any) -> bool:
    """Return whether two configs have different arrays, losses or initial weights."""
    try:
        program = case.program(config)
        trained = ModelAndObjective.from_config(other)
        if (trained.abstract, trained.variables) != (program.trained.abstract, program.trained.variables):
            return True
        for function, arguments in {
            "loss": (trained.specs, abstract_batch(config)),
            "init": (jax.eval_shape(lambda: jax.random.key(0)),),
        }.items():
            lower = functools.partial(_lower, program, function, arguments)
            text = reuse(program, ("text", function), functools.partial(lower, config, program.trained))
            if lower(other, trained) != text:
                return True
    except (AxlearnError, ValueError, TypeError):
        return True  # the part refuses the value, so it reads the setting
    return False


def _lower(program: Program, function: str, arguments: tuple[Any, ...], config: Any, trained: ModelAndObjective) -> str:
    """Return the lowered text of a function of a config, with the mesh of a program."""
    call = config.functions(trained.model)[function].call
    return program.trial_text(call, arguments, function, Selection(platform=program.platform))
