"""Every setting of the model has an effect."""

import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import attrs
import jax

from axlearn_core.compose import Program
from axlearn_core.config import Node, Scaled, get, patch
from axlearn_core.config.flat import leaves
from axlearn_core.contracts.capabilities import DeclaresBatches
from axlearn_core.contracts.experiment import get_input_config
from axlearn_core.errors import AxlearnError
from axlearn_plugins_verify.prove.contract import Difference, Outcome

PARTS = ("model.", "objective.")
KINDS = ("mathematics", "training")

_texts: "weakref.WeakKeyDictionary[Program, dict[str, str]]" = weakref.WeakKeyDictionary()
"""Lowered functions by name. They do not depend on the seed."""


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
            if not _differs(case, case.config, config) and not self._differs_before_shrinking(case, path):
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

    def _differs_before_shrinking(self, case: Any, path: str) -> bool:
        """Return whether a setting has an effect before the config is shrunk. The sizes of the shrunk config may hide it."""
        changed = next((config for other, config in changed_settings(case.original) if other == path), None)
        return changed is None or _differs(case, case.original, changed)


def changed_settings(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path of each number and flag that differs from its default, and the config with a different value."""
    for leaf in leaves(config):
        if not leaf.path.startswith(PARTS) or leaf.kind not in KINDS or _is_default(config, leaf.path):
            continue
        for value in _other_values(leaf.value):
            try:
                yield leaf.path, patch(config, {leaf.path: value})
            except AxlearnError:
                continue
            break


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
    """Return whether two configs have different losses or initial weights."""
    try:
        return any(_text(case, config, name) != _text(case, other, name) for name in ("loss", "init"))
    except (AxlearnError, ValueError, TypeError):
        return True  # the part refuses the value, so it reads the setting


def _text(case: Any, config: Any, function: str) -> str:
    program = case.program(config)
    texts = _texts.setdefault(program, {})
    if function not in texts:
        source = get_input_config(config)
        shapes = source.batch_shapes() if isinstance(source, DeclaresBatches) else {}
        batch = {name: jax.ShapeDtypeStruct(*spec) for name, spec in shapes.items()}
        texts[function] = program.lower(function, batch if function == "loss" else None).as_text()
    return texts[function]
