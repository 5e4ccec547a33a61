"""What stands between a model of a type that is not installed and the family that is nearest to it."""

import difflib
import fnmatch
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from axlearn_core.compose import Functional
from axlearn_core.errors import CheckpointError, ConfigError, RequestError, unknown
from axlearn_plugins_models.huggingface import files
from axlearn_plugins_models.huggingface.family import Json, families, family
from axlearn_plugins_models.huggingface.table import layout

SHOWN = 8


def unknown_type(directory: Path, data: Json) -> RequestError:
    """The error for a model directory whose `model_type` no family has.

    Every family is tried on its `config.json` and on the names of its tensors. The one with the fewest differences is named,
    and with it what a family of this type would have to add.

    Args:
        directory: the model.
        data: its `config.json`.
    """
    name = str(data.get("model_type", "(none)"))
    error = unknown("Hugging Face model_type", name, families())
    try:
        stored, unread = set(files.stored_tensors(directory)), ""
    except CheckpointError as refused:
        stored, unread = set(), f"\n    not compared, for lack of readable weights: {str(refused).splitlines()[0]}"
    lacks = {kind: _lacks(kind, data, stored) for kind in families()}
    if not lacks:
        return RequestError(f"{error}\n    fix: install a family, such as axlearn-plugins-models")
    best = min(lacks, key=lambda kind: (len(lacks[kind]), -difflib.SequenceMatcher(None, kind, name).ratio()))
    if not lacks[best]:
        names = f" and architectures to {list(family(best).architectures)}" if data.get("architectures") else ""
        return RequestError(
            f"{error}{unread}\n    fix: {best} describes {'its config.json' if unread else 'all of it'}; if it is one, set "
            f"model_type to that{names}"
        )
    more = [f"and {len(lacks[best]) - SHOWN} more"] if len(lacks[best]) > SHOWN else []
    lines = "\n".join(f"        {line}" for line in [*lacks[best][:SHOWN], *more])
    return RequestError(
        f"{error}{unread}\n    nearest: {best}, which does not have\n{lines}\n"
        "    fix: install a family that has these, or write one: docs/huggingface.md says how"
    )


def _lacks(model_type: str, data: Json, stored: set[str]) -> list[str]:
    """What a family does not describe of a `config.json` and of the tensors beside it."""
    model_family = family(model_type)
    try:
        resolved, unread = model_family.resolve({k: v for k, v in data.items() if k != "architectures"})
        trainer: Any = resolved.config
        model = Functional.of(trainer.model)
        expected = set(layout(model, model_family.table(model)))
    except ConfigError as error:
        problems = [f"{p.path}: {p.message}" + (f" ({p.got})" if p.got else "") for p in error.problems]
        return [*problems, *(f"tensor {n}" for n in _kinds(stored))]
    except (RequestError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return [f"config.json: {type(error).__name__} {error}", *(f"tensor {n}" for n in _kinds(stored))]
    lines = [f"config.json: {key} ({data[key]!r})" for key in unread]
    if stored:
        if model_family.prefix and not any(n.startswith(model_family.prefix) for n in stored):
            expected = {n.removeprefix(model_family.prefix) for n in expected}
        names = {n for n in stored if not any(fnmatch.fnmatchcase(n, p) for p in model_family.ignored)} - set(
            model_family.copies
        )
        lines += [f"tensor {n}" for n in _kinds(names - expected)]
        lines += [f"a model without tensor {n}" for n in _kinds(expected - stored)]
    return lines


def _kinds(names: Iterable[str]) -> list[str]:
    """Names of tensors without the numbers of layers and experts."""
    return sorted({re.sub(r"(^|(?<=\.))\d+(?=\.)", "*", n) for n in names})
