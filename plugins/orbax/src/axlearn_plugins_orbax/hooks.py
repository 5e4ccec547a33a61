"""Hooks of this plugin."""

from __future__ import annotations

from axlearn_core.checkpoint.manifest import Checkpoints
from axlearn_core.contracts.storage import Storage
from axlearn_core.plugins.hookspecs import hookimpl
from axlearn_plugins_orbax.foreign import ForeignSteps


@hookimpl
def axlearn_foreign_checkpoints(storage: Storage, folder: str, uri: str) -> ForeignSteps | None:
    """Return the plain Orbax steps in a folder, or None."""
    foreign = ForeignSteps(Checkpoints(storage, uri, folder))
    return foreign if foreign.steps() else None
