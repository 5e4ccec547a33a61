"""Compute per-device figures that all layouts on a mesh share: the state, the parameters, and activation shards."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import jax

from axlearn_core.compose import Program
from axlearn_core.contracts.experiment import offloads_optimizer
from axlearn_core.contracts.target import Machine
from axlearn_plugins_plan.search.space import MeshChoice, abstract_layout
from axlearn_plugins_plan.search.trace import Activation, StepTrace

COMPUTED_ITEMSIZE = 2
"""Bytes per element of a gathered parameter. Layers compute in bfloat16 on every target with known performance numbers."""


@attrs.frozen
class Parameter:
    """A parameter on a single device.

    Attributes:
        shape: Shape of the shard.
        stored: Bytes of the stored shard.
        numbers: Number of elements in the shard.
        group: Number of devices that the parameter is gathered over for compute.
        has_layer_axis: Whether it has a dimension for the layers.
    """

    shape: tuple[int, ...]
    stored: float
    numbers: float
    group: int
    has_layer_axis: bool

    @property
    def gathered_bytes(self) -> float:
        """Bytes of the gathered parameter."""
        return self.numbers * self.group * COMPUTED_ITEMSIZE


@attrs.frozen(kw_only=True)
class LayerParameters:
    """The layers' parameters on a single device, in bytes.

    Attributes:
        stored: All stored parameters.
        rounded: Copies in the compute precision. 0 if the parameters are stored in that precision.
        shapes: One parameter of each distinct shape.
        largest: Largest parameter across all layers.
        alike: All parameters that are as large as `largest`.
        sharded: Whether any parameter is gathered for compute.
    """

    stored: float
    rounded: float
    shapes: float
    largest: float
    alike: float
    sharded: bool


@attrs.define(eq=False, slots=False)
class MeshFigures:
    """Per-device figures that are the same for all layouts on a mesh."""

    program: Program
    config: Any
    machine: Machine
    choice: MeshChoice
    rules: Mapping[str, tuple[str, ...]] = attrs.field(init=False)
    layout: Any = attrs.field(init=False)
    _local: dict[Any, tuple[Any, float]] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.layout = abstract_layout(self.config.mesh, self.choice.shape, self.choice.stream)
        self.rules = self.layout.rules

    @cached_property
    def shardings(self) -> dict[str, Any]:
        """Path -> sharding of a parameter or variable."""
        trained = self.program.trained
        axes = {**trained.axes, **trained.variable_axes}
        specs = {**trained.abstract, **trained.variables}
        return {p: self.layout.sharding(axes[p], s.shape, p) for p, s in specs.items()}

    @cached_property
    def state_bytes(self) -> tuple[float, float]:
        """(bytes of the state without the optimizer state, bytes of the optimizer state)."""
        trained = self.program.trained
        places = self.layout.place_like(self.program.state, self.shardings, {**trained.abstract, **trained.variables})
        learner = _bytes(self.program.state.learner, places.learner)
        return _bytes(self.program.state, places) - learner, learner

    @property
    def offloads_optimizer(self) -> bool:
        """True if the config offloads the optimizer state to host memory."""
        return offloads_optimizer(self.config)

    @cached_property
    def batch_shards(self) -> int:
        """Number of devices that the rows are sharded over."""
        return self._size(self.rules["batch"])

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Mesh axes along which devices hold different tokens: different rows, or different positions of the same rows."""
        return (*self.rules["batch"], *self.rules["sequence"])

    @cached_property
    def parameters(self) -> list[Parameter]:
        """Every parameter of the model and its objective.

        A parameter is gathered over the axes that also shard tokens. Dimensions that tensor parallelism shards stay sharded.
        """
        split = set(self.token_axes)
        parameters = []
        for path, spec in self.program.trained.abstract.items():
            sharding = self.shardings[path]
            shape = sharding.shard_shape(spec.shape)
            numbers = math.prod(shape)
            axes = {a for part in sharding.spec for a in (part if isinstance(part, tuple) else (part,)) if a}
            stacked = "layers" in self.program.trained.axes[path]
            parameters.append(
                Parameter(shape, numbers * spec.dtype.itemsize, numbers, self._size(axes & split), stacked)
            )
        return parameters

    def _size(self, axes: Any) -> int:
        return math.prod(self.choice.shape.get(a, 1) for a in axes)

    def local(self, activations: Sequence[Activation], offloaded: bool = False) -> float:
        """Return the bytes of activations on one device, across all layers."""
        key = id(activations), offloaded
        if key not in self._local:
            # Storing the activations keeps them alive, so that no other object can reuse their id.
            self._local[key] = activations, self._local_bytes(activations, offloaded)
        return self._local[key][1]

    def _local_bytes(self, activations: Sequence[Activation], offloaded: bool) -> float:
        total = 0.0
        for a in activations:
            if a.offloaded != offloaded:
                continue
            used: set[str] = set()
            size = math.prod(a.shape) * a.itemsize * a.layers
            for dim, axis in zip(a.shape, a.axes, strict=True):
                mesh_axes = [m for m in self.rules.get(axis or "", ()) if m not in used]
                count = self._size(mesh_axes)
                if count > 1 and dim % count == 0:
                    used.update(mesh_axes)
                    size /= count
            total += size
        return total

    @cached_property
    def gathered_bytes(self) -> Mapping[int, float]:
        """Size of a gather group -> bytes of the shards gathered over groups of that size, in the compute precision."""
        by_group: dict[int, float] = {}
        for p in self.parameters:
            by_group[p.group] = by_group.get(p.group, 0.0) + p.numbers * COMPUTED_ITEMSIZE
        return by_group

    @cached_property
    def parameter_bytes(self) -> tuple[float, float, float]:
        """(gathered bytes in the layers, gathered bytes of all other parameters, stored bytes of all parameters)."""
        layer_bytes = sum(p.gathered_bytes for p in self.parameters if p.has_layer_axis)
        other_bytes = sum(p.gathered_bytes for p in self.parameters if not p.has_layer_axis)
        return layer_bytes, other_bytes, sum(p.stored for p in self.parameters)

    @cached_property
    def layer_parameters(self) -> LayerParameters:
        """The parameters of the layers."""
        layers = [p for p in self.parameters if p.has_layer_axis]
        largest = max((p.stored for p in layers), default=0.0)
        return LayerParameters(
            stored=sum(p.stored for p in layers),
            rounded=sum(p.numbers * COMPUTED_ITEMSIZE for p in layers if p.stored > p.numbers * COMPUTED_ITEMSIZE),
            shapes=sum({p.shape: p.stored for p in layers}.values()),
            largest=largest,
            alike=sum(p.stored for p in layers if p.stored == largest),
            sharded=any(p.group > 1 for p in layers),
        )

    def spread(self, axes: Sequence[str]) -> tuple[int, int, int]:
        """Return (members, domains, maximum members in one domain) for a group over the given mesh axes."""
        members = self._size(axes)
        inner, within = 1, 1
        per = self.machine.devices_per_domain
        for axis in reversed(("pipeline", "data", "fsdp", "expert", "seq", "tensor")):
            size = self.choice.shape.get(axis, 1)
            if axis in axes:
                within *= max(1, min(size, per // inner)) if inner < per else 1
            inner *= size
        return members, max(1, members // within), within


def _bytes(tree: Any, places: Any) -> float:
    total = 0.0
    for leaf, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(places), strict=True):
        total += math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return total


def whole_stream(figures: MeshFigures, trace: StepTrace) -> float:
    """Return the bytes of the full-width residual stream on one device, sharded only by rows and context parallelism."""
    if not trace.stream:
        return 0.0
    devices = figures.batch_shards * figures.choice.shape.get("seq", 1)
    return math.prod(trace.stream[0].shape) * COMPUTED_ITEMSIZE / devices
