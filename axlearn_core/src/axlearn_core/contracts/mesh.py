"""Device meshes, and rules that map logical axes to mesh axes. This module does not import JAX."""

from collections.abc import Iterable, Mapping
from typing import Literal

import attrs

from axlearn_core.config.node import Node, node
from axlearn_core.contracts.target import Machine
from axlearn_core.errors import ConfigError, Problem, counted, nearest

MESH_AXES = ("pipeline", "data", "fsdp", "expert", "seq", "tensor")
"""Axes of every mesh, outermost first. The default size of each axis is 1."""

DEFAULT_RULES: Mapping[str, tuple[str, ...]] = {
    # activations
    "batch": ("data", "fsdp", "expert"),
    "sequence": ("seq",),
    "residual_sequence": ("seq",),  # the sequence between blocks, which process positions separately
    "activation_embed": (),
    "activation_mlp": ("tensor",),
    "activation_heads": ("tensor",),
    "activation_kv": ("tensor",),
    "activation_vocab": ("tensor",),
    # parameters
    "embed": ("fsdp", "seq"),
    "mlp": ("tensor",),
    "heads": ("tensor",),
    "kv": ("tensor",),
    "head_dim": (),
    "vocab": ("tensor",),
    "layers": (),
    "experts": ("expert",),
    "norm": (),
    "rank": (),  # the low rank of a factored matrix
    "taps": (),  # the positions that a convolution reads
}
"""Fully sharded data parallelism over `fsdp`, tensor parallelism over `tensor`.

Devices along `seq` hold different positions of the same rows, so parameters are also sharded over `seq`. Each device gathers
them before use.
"""


Size = int | Literal["host", "domain", "domains"]
"""Size of a mesh axis in a mesh rule: a number, -1 for all remaining devices, the number of devices in a `host` or `domain`, or
the number of `domains`. A domain is a group of devices with fast links."""


@attrs.frozen(kw_only=True)
class MeshRule:
    """Layout and features for a set of machines. If several rules match, the most specific one applies.

    Attributes:
        target: Pattern for machine names (`tpu-v5e-*`, `h100-8x*`).
        parameters: Range of model sizes, in parameters: inclusive minimum and exclusive maximum.
        shape: Sizes of mesh axes; see `Size`.
        rules: Mesh axes for each logical axis. They override the default rules.
        features: Features to apply, in the syntax of the command line (`remat:save=[query,key]`).
        packages: Distribution that provides each feature, named in the error message if it is not installed.
        fallback_shape: Mesh shape to use if the config has none and the default shape cannot shard its parameters. This also
            applies to a detected machine if `detected` is False, because the run would fail otherwise.
        detected: If False, the rule applies only if the user names the target, not if the machine is detected.
    """

    target: str
    parameters: tuple[float, float] = (0, float("inf"))
    shape: Mapping[str, Size] = {}
    rules: Mapping[str, tuple[str, ...]] = {}
    features: tuple[str, ...] = ()
    packages: Mapping[str, str] = {}
    fallback_shape: Mapping[str, Size] = {}
    detected: bool = True

    @property
    def rank(self) -> tuple[int, float]:
        """Specificity: the number of literal characters in the pattern, then how narrow the range of model sizes is."""
        low, high = self.parameters
        return sum(c not in "*?" for c in self.target), -(high - low)

    def sizes(self, machine: Machine) -> dict[str, int]:
        """Resolve `shape` for a machine."""
        return sizes_on(machine, self.shape)


def sizes_on(machine: Machine, shape: Mapping[str, Size]) -> dict[str, int]:
    """Resolve a mesh shape for a machine."""
    sizes = {"host": machine.devices_per_host, "domain": machine.devices_per_domain, "domains": machine.domains}
    return {axis: sizes[size] if isinstance(size, str) else size for axis, size in shape.items()}


@node
class TargetRule(Node[None]):
    """A mesh rule inside a config. It applies to machines whose names match its key in `mesh.targets`."""

    shape: Mapping[str, Size] = {}
    rules: Mapping[str, tuple[str, ...]] = {}
    features: tuple[str, ...] = ()


@node
class Mesh(Node[None]):
    """Shape of the device mesh, and rules that map logical axes to mesh axes.

    Attributes:
        shape: Sizes of mesh axes. One axis may be -1, for all remaining devices. An empty shape puts all devices on `fsdp`.
        rules: Mesh axes for each logical axis. They override the default rules.
        targets: Mesh rules, keyed by a pattern for machine names. A matching rule replaces the rules from plugins.
        compiler_options: XLA options. They override the target's options.
    """

    shape: Mapping[str, int] = {}
    rules: Mapping[str, tuple[str, ...]] = {}
    targets: Mapping[str, TargetRule] = {}
    compiler_options: Mapping[str, bool | int | float | str] = {}

    def validate(self) -> Iterable[Problem]:
        """Report unknown axes, invalid sizes, and more than one -1."""
        for field, names in (("shape", self.shape), *((f"rules.{k}", v) for k, v in self.rules.items())):
            for axis in names:
                if axis not in MESH_AXES:
                    yield Problem(
                        path=f"{field}.{axis}",
                        message=f"unknown mesh axis {axis!r}",
                        expected=f"one of {', '.join(MESH_AXES)}",
                        nearest=nearest(axis, MESH_AXES),
                    )
        for axis, size in self.shape.items():
            if size == 0 or size < -1:
                yield Problem(
                    path=f"shape.{axis}", message="invalid size", got=str(size), expected="a positive number, or -1"
                )
        if list(self.shape.values()).count(-1) > 1:
            yield Problem(path="shape", message="only one axis can be -1", got=str(dict(self.shape)))

    def sizes(self, devices: int) -> dict[str, int]:
        """Return the size of every axis for a number of devices. Raise `ConfigError` if their product differs."""
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
                    message="its product is not the number of devices",
                    got=f"{dict(self.shape)} ({product})",
                    expected=counted(devices, "device"),
                    fix="change one axis, or set it to -1 to use the remaining devices",
                )
            )
        return {axis: shape.get(axis, 1) for axis in MESH_AXES}
