"""All hooks, on one screen. A plugin module implements some of them with `@hookimpl`; docs/hooks.md has examples.

Modules with hooks import no JAX: they say what there is, and name what to load as `"module:attribute"`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from axlearn_core.contracts.kernels import KernelImplementation
    from axlearn_core.contracts.mesh import MeshRule
    from axlearn_core.contracts.migration import Migration
    from axlearn_core.contracts.parts import Weights
    from axlearn_core.contracts.remat import RematPolicy
    from axlearn_core.contracts.storage import ForeignCheckpoints, Storage
    from axlearn_core.contracts.target import Target

hookspec = pluggy.HookspecMarker("axlearn")
hookimpl = pluggy.HookimplMarker("axlearn")


@hookspec
def axlearn_kernels() -> Iterable[KernelImplementation]:  # type: ignore[empty-body]
    """The kernels that this plugin has; each names its op's class and what to load as `"module:name"`."""


@hookspec
def axlearn_targets() -> Iterable[Target]:  # type: ignore[empty-body]
    """The hardware that this plugin knows."""


@hookspec
def axlearn_before_devices() -> None:
    """Called before JAX looks for devices, by commands and runs: to tell a library of some hardware that there is none here."""


@hookspec
def axlearn_mesh_rules() -> Iterable[MeshRule]:  # type: ignore[empty-body]
    """How programs are laid out on some machines."""


@hookspec
def axlearn_remat_policies() -> Iterable[RematPolicy]:  # type: ignore[empty-body]
    """Named choices of what the backward pass keeps (`--with remat:policy=NAME`)."""


@hookspec
def axlearn_migrations() -> Iterable[Migration]:  # type: ignore[empty-body]
    """How configs and checkpoints that earlier versions of this plugin wrote are read."""


@hookspec
def axlearn_checkpoint_storage(uri: str) -> Storage | None:
    """The storage of a URI (`"s3://bucket/run"`), or None where its scheme is not this plugin's."""


@hookspec
def axlearn_weights(uri: str) -> Weights | None:
    """The weights at a URI or path that is not a run directory, or None where this plugin does not know them."""


@hookspec
def axlearn_foreign_checkpoints(storage: Storage, folder: str, uri: str) -> ForeignCheckpoints | None:
    """The checkpoints that another library wrote in a folder of a storage (`uri` is the folder's), or None."""


@hookspec
def axlearn_doctor_checks() -> Iterable[str]:  # type: ignore[empty-body]
    """Checks of `axlearn plugins doctor`, as `"module:function"`: each returns `Finding`s and takes no arguments."""


@hookspec
def axlearn_run_listeners() -> Iterable[str]:  # type: ignore[empty-body]
    """Functions that give a run a listener, as `"module:function"`: from the session to a `RunListener`, or to None."""
