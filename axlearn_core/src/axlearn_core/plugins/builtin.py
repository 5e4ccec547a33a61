"""What the core itself says through hooks."""

from axlearn_core.contracts.mesh import MeshRule
from axlearn_core.contracts.target import Target
from axlearn_core.plugins.hookspecs import hookimpl


@hookimpl
def axlearn_targets() -> list[Target]:
    """The CPU, which has no peak that holds for all of them: no MFU is shown on it."""
    return [
        Target(
            name="cpu",
            summary="The CPU of this machine, or a number of virtual devices",
            device_kinds=("cpu",),
            examples=("cpu", "cpu-8"),
            topology="axlearn_core.compose.devices:cpu",
        )
    ]


@hookimpl
def axlearn_mesh_rules() -> list[MeshRule]:
    """The rule of CPUs.

    XLA:CPU compiles unrolled layers to a faster program than a scan of them, in more time: a named target brings that.
    Weights that the processes cannot split between them, such as a width of 128 on three machines, are replicated.
    """
    packages = {"scan": "axlearn-plugins-tools"}
    return [
        MeshRule(
            target="cpu*",
            features=("scan:on=false",),
            packages=packages,
            indivisible={"data": -1},
            detected=False,
        )
    ]
