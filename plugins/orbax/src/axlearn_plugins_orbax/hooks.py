"""Finds the checkpoints of plain Orbax."""

from __future__ import annotations

from axlearn_core.checkpoint.manifest import Checkpoints
from axlearn_core.plugins.hookspecs import hookimpl
from axlearn_plugins_orbax.foreign import ForeignSteps


@hookimpl
def axlearn_foreign_checkpoints(place: Checkpoints) -> ForeignSteps | None:
    """The steps of plain Orbax in a folder."""
    found = ForeignSteps(place)
    return found if found.steps() else None
