"""Paths relative to a run, such as `run:files/input.tokenizer/tokenizer.json`. Run configs use them for assets."""

from collections.abc import Iterable
from typing import Any

from axlearn_core.config.node import Node, asset_fields, get_fields
from axlearn_core.errors import Problem

RUN_SCHEME = "run:"
"""Prefix of a path relative to the run."""


def check_assets(value: Node[Any]) -> Iterable[Problem]:
    """Return a problem for each of a node's assets whose run is missing."""
    for name in asset_fields(type(value)):
        path = get_fields(value)[name]
        if isinstance(path, str) and path.startswith(RUN_SCHEME):
            yield Problem(
                path=name,
                message="refers to a file of a run, but the run does not have it",
                got=path,
                expected=f"a config.yaml inside its run, next to {path.removeprefix(RUN_SCHEME)}",
                fix="copy the complete run directory, or set the path of the file",
            )
