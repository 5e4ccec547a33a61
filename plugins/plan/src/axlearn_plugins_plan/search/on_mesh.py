"""What is the same for all layouts on one mesh, of one device: its state, its parameters, and its part of activations."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import jax

from axlearn_core.compose import Program
from axlearn_core.contracts.experiment import offloads_optimizer
from axlearn_core.contracts.target import Machine
from axlearn_plugins_plan.search.space import MeshChoice, laid
from axlearn_plugins_plan.search.trace import Activation, StepTrace

COMPUTED_ITEMSIZE = 2
"""Bytes of a parameter as it is gathered: layers compute in bfloat16 on every target that has figures."""


@attrs.frozen
class Parameter:
    """One parameter on one device: its shape, its bytes as stored, its numbers, over how many devices it is gathered to compute,
    and whether it has a dimension for the layers."""

    shape: tuple[int, ...]
    stored: float
    numbers: float
    group: int
    stacked: bool

    @property
    def gathered(self) -> float:
        """Bytes of the gathered parameter."""
        return self.numbers * self.group * COMPUTED_ITEMSIZE


@attrs.frozen(kw_only=True)
class Stacked:
    """The parameters of the layers on one device, in bytes.

    Attributes:
        stored: all of them.
        rounded: copies of all in the precision that layers compute in; 0 where they are stored in it.
        shapes: one of each shape.
        largest: the largest, of all layers.
        alike: all that are as large.
        sharded: whether any is gathered to compute.
    """

    stored: float
    rounded: float
    shapes: float
    largest: float
    alike: float
    sharded: bool


@attrs.define(eq=False, slots=False)
class MeshFigures:
    """What is the same for all layouts on one mesh, of one device."""

    program: Program
    config: Any
    machine: Machine
    choice: MeshChoice
    rules: Mapping[str, tuple[str, ...]] = attrs.field(init=False)
    layout: Any = attrs.field(init=False)
    _local: dict[Any, tuple[Any, float]] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.layout = laid(self.config.mesh, self.choice.shape, self.choice.stream)
        self.rules = self.layout.rules

    @cached_property
    def shardings(self) -> dict[str, Any]:
        """Path -> where a parameter or variable lives."""
        trained = self.program.trained
        axes = {**trained.axes, **trained.variable_axes}
        specs = {**trained.abstract, **trained.variables}
        return {p: self.layout.sharding(axes[p], s.shape, p) for p, s in specs.items()}

    @cached_property
    def state_bytes(self) -> tuple[float, float]:
        """(the state without the optimizer's, the optimizer's)."""
        trained = self.program.trained
        places = self.layout.place_like(self.program.state, self.shardings, {**trained.abstract, **trained.variables})
        learner = _bytes(self.program.state.learner, places.learner)
        return _bytes(self.program.state, places) - learner, learner

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the config keeps the optimizer's state in the host's memory."""
        return offloads_optimizer(self.config)

    @cached_property
    def batch_shards(self) -> int:
        """Over how many devices the rows are split."""
        return self._size(self.rules["batch"])

    @cached_property
    def parameters(self) -> list[Parameter]:
        """Every parameter of the model and its objective.

        One is gathered over the axes that split rows too; what tensor parallelism splits stays split.
        """
        split = set(self.rules["batch"])
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
        """Bytes of one device, of all layers."""
        key = id(activations), offloaded
        if key not in self._local:
            self._local[key] = activations, self._local_bytes(activations, offloaded)  # what is held keeps its id
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
    def gathered(self) -> Mapping[int, float]:
        """Over how many devices parameters are gathered -> bytes of one device of those, as they are sent."""
        by_group: dict[int, float] = {}
        for p in self.parameters:
            by_group[p.group] = by_group.get(p.group, 0.0) + p.numbers * COMPUTED_ITEMSIZE
        return by_group

    @cached_property
    def parameter_bytes(self) -> tuple[float, float, float]:
        """(gathered, of the layers; gathered, of all else; as one device stores them)."""
        of_layers = sum(p.gathered for p in self.parameters if p.stacked)
        rest = sum(p.gathered for p in self.parameters if not p.stacked)
        return of_layers, rest, sum(p.stored for p in self.parameters)

    @cached_property
    def stacked(self) -> Stacked:
        """The parameters of the layers."""
        layers = [p for p in self.parameters if p.stacked]
        largest = max((p.stored for p in layers), default=0.0)
        return Stacked(
            stored=sum(p.stored for p in layers),
            rounded=sum(p.numbers * COMPUTED_ITEMSIZE for p in layers if p.stored > p.numbers * COMPUTED_ITEMSIZE),
            shapes=sum({p.shape: p.stored for p in layers}.values()),
            largest=largest,
            alike=sum(p.stored for p in layers if p.stored == largest),
            sharded=any(p.group > 1 for p in layers),
        )

    def spread(self, axes: Sequence[str]) -> tuple[int, int, int]:
        """(members, domains, most members in one domain) of a group over some mesh axes."""
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
    """Bytes of the residual stream of a device's rows over its whole width, and the length that context parallelism leaves."""
    if not trace.stream:
        return 0.0
    devices = figures.batch_shards * figures.choice.shape.get("seq", 1)
    return math.prod(trace.stream[0].shape) * COMPUTED_ITEMSIZE / devices
