"""The mesh of devices and the rules that map logical axes to its axes. Imports no JAX."""

from collections.abc import Iterable, Mapping
from typing import Literal

import attrs

from axlearn_core.config.node import Node, node
from axlearn_core.contracts.target import Machine
from axlearn_core.errors import ConfigError, Problem, nearest

MESH_AXES = ("pipeline", "data", "fsdp", "expert", "seq", "tensor")
"""Every mesh has these axes, in this order, outermost first; those that a shape does not name have size 1."""

DEFAULT_RULES: Mapping[str, tuple[str, ...]] = {
    # activations
    "batch": ("data", "fsdp", "expert"),
    "sequence": ("seq",),
    "residual_sequence": ("seq",),  # the sequence between blocks, where each position is worked on by itself
    "activation_embed": (),
    "activation_mlp": ("tensor",),
    "activation_heads": ("tensor",),
    "activation_kv": ("tensor",),
    "activation_vocab": ("tensor",),
    # parameters
    "embed": ("fsdp",),
    "mlp": ("tensor",),
    "heads": ("tensor",),
    "kv": ("tensor",),
    "head_dim": (),
    "vocab": ("tensor",),
    "layers": (),
    "experts": ("expert",),
    "norm": (),
    "rank": (),  # the narrow side of a factored matrix
}
"""Fully sharded data parallelism over `fsdp`, tensor parallelism over `tensor`."""


Size = int | Literal["host", "domain", "domains"]
"""Of a mesh axis in a mesh rule: a number, -1 for all that are left, or what the machine has: the devices of a `host` or
of a `domain` (with fast links among themselves), or the number of `domains`."""


@attrs.frozen(kw_only=True)
class MeshRule:
    """How programs are laid out on some machines. Of the rules that match, the most specific one holds.

    Attributes:
        target: a pattern of machine names (`tpu-v5e-*`, `h100-8x*`).
        parameters: the sizes of model that it is for, in parameters: from, up to but not with.
        shape: mesh axis -> size; see `Size`.
        rules: logical axis -> mesh axes, over the default rules.
        features: what to apply there, as on the command line (`remat:save=[query,key]`).
        packages: feature -> the distribution that has it, for the error where it is not installed.
        indivisible: the shape of a config that asks for none and whose parameters the default shape cannot split. A machine
            that was detected brings it, whatever `detected` says: without it, the run would be refused.
        detected: whether a machine that was detected brings the rule's execution; otherwise only a target that is named.
    """

    target: str
    parameters: tuple[float, float] = (0, float("inf"))
    shape: Mapping[str, Size] = {}
    rules: Mapping[str, tuple[str, ...]] = {}
    features: tuple[str, ...] = ()
    packages: Mapping[str, str] = {}
    indivisible: Mapping[str, Size] = {}
    detected: bool = True

    @property
    def rank(self) -> tuple[int, float]:
        """The most specific rule has the greatest: letters that a pattern fixes, then how narrow its sizes are."""
        low, high = self.parameters
        return sum(c not in "*?" for c in self.target), -(high - low)

    def sizes(self, machine: Machine) -> dict[str, int]:
        """`shape` in numbers."""
        return sizes_on(machine, self.shape)


def sizes_on(machine: Machine, shape: Mapping[str, Size]) -> dict[str, int]:
    """A shape in numbers."""
    meant = {"host": machine.devices_per_host, "domain": machine.devices_per_domain, "domains": machine.domains}
    return {axis: meant[size] if isinstance(size, str) else size for axis, size in shape.items()}


@node
class TargetRule(Node[None]):
    """A mesh rule of one config, for the machines whose names fit its key in `mesh.targets`."""

    shape: Mapping[str, Size] = {}
    rules: Mapping[str, tuple[str, ...]] = {}
    features: tuple[str, ...] = ()


@node
class Mesh(Node[None]):
    """How many devices each mesh axis has, and which mesh axes a logical axis is split over.

    `shape` may give one axis as -1: all the devices that are left. The default, an empty shape, puts every device on
    `fsdp`. `rules` are laid over the default rules. `targets` are mesh rules of this config, by a pattern of machine
    names; where one fits, it holds instead of those of plugins. `compiler_options` are XLA's, laid over the target's.
    """

    shape: Mapping[str, int] = {}
    rules: Mapping[str, tuple[str, ...]] = {}
    targets: Mapping[str, TargetRule] = {}
    compiler_options: Mapping[str, bool | int | float | str] = {}

    def validate(self) -> Iterable[Problem]:
        """Reports unknown axes, non-positive sizes, and more than one -1."""
        for field, names in (("shape", self.shape), *((f"rules.{k}", v) for k, v in self.rules.items())):
            for axis in names:
                if axis not in MESH_AXES:
                    yield Problem(
                        path=f"{field}.{axis}",
                        message=f"no mesh has an axis {axis!r}",
                        expected=f"one of {', '.join(MESH_AXES)}",
                        nearest=nearest(axis, MESH_AXES),
                    )
        for axis, size in self.shape.items():
            if size == 0 or size < -1:
                yield Problem(
                    path=f"shape.{axis}", message="no size", got=str(size), expected="a positive number, or -1"
                )
        if list(self.shape.values()).count(-1) > 1:
            yield Problem(path="shape", message="only one axis can be -1", got=str(dict(self.shape)))

    def sizes(self, devices: int) -> dict[str, int]:
        """Axis -> size for a number of devices, all axes named; raises `ConfigError` where they do not multiply to it."""
        shape = dict(self.shape) or {"fsdp": -1}
        product = 1
        for size in shape.values():
            product *= size if size != -1 else 1
        free = [axis for axis, size in shape.items() if size == -1]
        if free and devices % product == 0:
            shape[free[0]] = devices // product
            product = devices
        if product != devices:
            raise ConfigError(
                Problem(
                    path="mesh.shape",
                    message="does not multiply to the number of devices",
                    got=f"{dict(self.shape)} ({product})",
                    expected=f"{devices} devices",
                    fix="change one axis, or give it as -1 to take what is left",
                )
            )
        return {axis: shape.get(axis, 1) for axis in MESH_AXES}
