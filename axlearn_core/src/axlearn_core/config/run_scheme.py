"""Paths inside a run, as a run's config writes those of its assets: `run:files/input.tokenizer/tokenizer.json`."""

from collections.abc import Iterable
from typing import Any

from axlearn_core.config.node import Node, asset_fields, fields_of
from axlearn_core.errors import Problem

RUN_SCHEME = "run:"
"""The value of an asset field in a run's config begins with it; the rest is a path inside the run."""


def unattached(value: Node[Any]) -> Iterable[Problem]:
    """The assets of a node that the run they belong to does not have."""
    for name in asset_fields(type(value)):
        path = fields_of(value)[name]
        if isinstance(path, str) and path.startswith(RUN_SCHEME):
            yield Problem(
                path=name,
                message="names a file of a run that is not there",
                got=path,
                expected=f"a config.yaml in its run, beside {path.removeprefix(RUN_SCHEME)}",
                fix="copy the run directory as a whole, or set the path of the file",
            )
