"""The hooks of the core: the CPU target and its mesh rule."""

from axlearn_core.contracts.mesh import MeshRule
from axlearn_core.contracts.target import Target
from axlearn_core.plugins.hookspecs import hookimpl


@hookimpl
def axlearn_targets() -> list[Target]:
    """Return the CPU target. Its peak FLOP/s is not set because it differs between CPUs, so MFU is not reported."""
    return [
        Target(
            name="cpu",
            summary="CPU of this machine, or several virtual devices",
            device_kinds=("cpu",),
            examples=("cpu", "cpu-8"),
            topology="axlearn_core.compose.devices:cpu",
        )
    ]


@hookimpl
def axlearn_mesh_rules() -> list[MeshRule]:
    """Return the mesh rule for CPUs.

    XLA:CPU compiles unrolled layers to a faster program than a scan, but compiling takes longer. The rule therefore unrolls
    layers only if the user names a CPU target. Weights are replicated if the processes cannot shard them evenly, for example
    if the width is 128 and there are three machines.
    """
    packages = {"scan": "axlearn-plugins-tools"}
    return [
        MeshRule(
            target="cpu*",
            features=("scan:on=false",),
            packages=packages,
            fallback_shape={"data": -1},
            detected=False,
        )
    ]
