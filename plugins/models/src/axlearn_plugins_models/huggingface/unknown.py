"""Error for models of an unknown type, with a comparison to the nearest family."""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axlearn_core.compose import Functional
from axlearn_core.errors import CheckpointError, ConfigError, RequestError, unknown
from axlearn_plugins_models.huggingface import files
from axlearn_plugins_models.huggingface.family import KIND, Json, families, family, not_installed
from axlearn_plugins_models.huggingface.files import StoredTensor

SHOWN = 8


def unknown_type(directory: Path, data: Json) -> RequestError:
    """Return the error for a model directory whose `model_type` has no family.

    If an index lists the type, the message names the package to install. Otherwise, compares every family with its
    `config.json` and tensor names. The message then names the family with the fewest differences, and lists what a family for
    this type would have to add.

    Args:
        directory: Model directory.
        data: Content of its `config.json`.
    """
    name = str(data.get("model_type", "(none)"))
    if error := not_installed(name):
        return error
    error = unknown(KIND, name, families())
    try:
        stored, unread = files.stored_tensors(directory), ""
    except CheckpointError as refused:
        stored, unread = {}, f"\n    tensors were not compared, because: {str(refused).splitlines()[0]}"
    lacks = {kind: _lacks(kind, data, stored) for kind in families()}
    if not lacks:
        return RequestError(f"{error}\n    fix: install a family, such as axlearn-plugins-models")
    best = min(lacks, key=lambda kind: (len(lacks[kind]), -difflib.SequenceMatcher(None, kind, name).ratio()))
    if not lacks[best]:
        fitting = [kind for kind in lacks if not lacks[kind]]
        names = f" and architectures to {list(family(best).architectures)}" if data.get("architectures") else ""
        return RequestError(
            f"{error}{unread}\n    nearest: {', '.join(fitting)}, which {'has' if len(fitting) == 1 else 'have'} every key"
            f"{'' if unread else ' and tensor'} of this model, but may compute something else\n"
            f"    fix: if it is a {best} model, set model_type to {best}{names}; otherwise write a family"
            f"{_command(name, best)}; see docs/huggingface.md"
        )
    more = [f"and {len(lacks[best]) - SHOWN} more"] if len(lacks[best]) > SHOWN else []
    lines = "\n".join(f"        {line}" for line in [*lacks[best][:SHOWN], *more])
    return RequestError(
        f"{error}{unread}\n    nearest: {best}, which does not support\n{lines}\n"
        f"    fix: install or write a family that supports these{_command(name, best)}; see docs/huggingface.md"
    )


def _command(model_type: str, best: str) -> str:
    """Return the command that begins a family like the best one, or an empty string if there is no such command."""
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", model_type) or not family(best).text:
        return ""
    return f" (begin with `axlearn plugins new --family {model_type} --like {best}`)"


def _lacks(model_type: str, data: Json, stored: Mapping[str, StoredTensor]) -> list[str]:
    """Return the parts of a `config.json` and its tensors that a family does not describe."""
    model_family = family(model_type)
    try:
        resolved, unread = model_family.resolve({k: v for k, v in data.items() if k != "architectures"})
        trainer: Any = resolved.config
        model = Functional.from_config(trainer.model)
        expected = set(model_family.layout(model, data))
        ignored = model_family.ignored_names(data, stored)
        names = set(model_family.dequantize(data, {n: t for n, t in stored.items() if n not in ignored}))
    except ConfigError as error:
        problems = [f"{p.path}: {p.message}" + (f" ({p.got})" if p.got else "") for p in error.problems]
        return [*problems, *(f"tensor {n}" for n in files.name_kinds(stored))]
    except (RequestError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return [f"config.json: {type(error).__name__} {error}", *(f"tensor {n}" for n in files.name_kinds(stored))]
    lines = [f"config.json: {key} ({data[key]!r})" for key in unread]
    if stored:
        if model_family.prefix and not any(n.startswith(model_family.prefix) for n in names):
            expected = {n.removeprefix(model_family.prefix) for n in expected}
        lines += [f"tensor {n}" for n in files.name_kinds(names - expected - {*model_family.copies})]
        lines += [f"a model without tensor {n}" for n in files.name_kinds(expected - names)]
    return lines
