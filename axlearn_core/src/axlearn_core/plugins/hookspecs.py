"""Specifications of all hooks. Plugin modules implement hooks with `@hookimpl`; docs/hooks.md has examples.

Modules that implement hooks must not import JAX. They refer to objects as `"module:attribute"`, and each object is imported on use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
    """Return the kernels of this plugin. Each one refers to its op's class and to its own code as `"module:name"`."""


@hookspec
def axlearn_targets() -> Iterable[Target]:  # type: ignore[empty-body]
    """Return the hardware targets that this plugin supports."""


@hookspec
def axlearn_before_devices(platforms: Sequence[str] | None) -> None:
    """Run before JAX initializes its backends.

    Every entry point of the framework calls this hook. For example, a plugin can prevent a hardware library from searching
    for devices.

    Args:
        platforms: Platforms that the user requested with `JAX_PLATFORMS`. None if JAX tries all installed platforms.
    """


@hookspec
def axlearn_mesh_rules() -> Iterable[MeshRule]:  # type: ignore[empty-body]
    """Return mesh rules, which define the mesh, sharding rules, and features for some machines."""


@hookspec
def axlearn_remat_policies() -> Iterable[RematPolicy]:  # type: ignore[empty-body]
    """Return named policies that choose the activations to save for the backward pass (`--with remat:policy=NAME`)."""


@hookspec
def axlearn_migrations() -> Iterable[Migration]:  # type: ignore[empty-body]
    """Return migrations for configs and checkpoints that earlier versions of this plugin wrote."""


@hookspec
def axlearn_checkpoint_storage(uri: str) -> Storage | None:
    """Return the storage for a URI (`"s3://bucket/run"`), or None if this plugin does not support its scheme."""


@hookspec
def axlearn_weights(uri: str) -> Weights | None:
    """Return the weights at a URI or path that is not a run directory, or None if this plugin cannot read them."""


@hookspec
def axlearn_foreign_checkpoints(storage: Storage, folder: str, uri: str) -> ForeignCheckpoints | None:
    """Return the checkpoints that a different library wrote to a folder, or None. `uri` is the URI of the folder."""


@hookspec
def axlearn_doctor_checks() -> Iterable[str]:  # type: ignore[empty-body]
    """Return the checks of this plugin for `axlearn plugins doctor`, as `"module:function"`.

    Each check is a function without arguments that returns a list of `Finding`.
    """


@hookspec
def axlearn_run_listeners() -> Iterable[str]:  # type: ignore[empty-body]
    """Return factories of run listeners, as `"module:function"`.

    Each factory takes the session and returns a `RunListener` or None.
    """
