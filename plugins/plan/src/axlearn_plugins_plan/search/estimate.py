"""Memory and time of a layout by formulas, from one trace of the step: thousands in seconds, nothing compiled.

The work of a step is told in the same terms as that of a compiled program (FLOPs, bytes to and from memory, collectives by mesh
axes), so that one roofline and one prediction serve both. What formulas cannot know, the compiler's own buffers and passes over
memory, has a few coefficients for each platform (`figures.toml`): chosen by hand beside compiled layouts of GPUs. Those of TPUs and
Trainium are copies of these, which no compiled layout has checked.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import jax

from axlearn_core.compose import Program
from axlearn_core.contracts.target import Machine
from axlearn_plugins_plan.collectives import Collective, bytes_sent
from axlearn_plugins_plan.roofline import Roofline, roofline
from axlearn_plugins_plan.search.figures import Coefficients
from axlearn_plugins_plan.search.pipelines import Pipeline
from axlearn_plugins_plan.search.space import Choice, MeshChoice, laid
from axlearn_plugins_plan.search.trace import Activation, StepTrace

COMPUTED_ITEMSIZE = 2
"""Bytes of a parameter as it is gathered: layers compute in bfloat16 on every target that has figures."""
COLUMNS = ("layer", "stream", "whole_stream", "weights", "vocabulary", "gradients", "accumulated")


@attrs.frozen(kw_only=True)
class Estimate:
    """What formulas say of one layout, of one device.

    Attributes:
        arguments: bytes of the training state and the batch; exact.
        kept: bytes of what the forward pass leaves for the backward pass.
        columns: bytes of each of `COLUMNS`, whose coefficients stand in `figures.toml`.
        temporaries: bytes of everything that exists during the step only.
        roofline: of the step.
        host: what goes to the host's memory and back.
    """

    arguments: float
    kept: float
    columns: Mapping[str, float]
    temporaries: float
    roofline: Roofline
    host: "Host"

    @property
    def total(self) -> float:
        """Bytes."""
        return self.arguments + self.temporaries


@attrs.frozen
class Parameter:
    """One parameter on one device: its bytes as stored, its numbers, over how many devices it is gathered to compute, and
    whether it has a dimension for the layers."""

    stored: float
    numbers: float
    group: int
    stacked: bool

    @property
    def gathered(self) -> float:
        """Bytes of the gathered parameter."""
        return self.numbers * self.group * COMPUTED_ITEMSIZE


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
            numbers = math.prod(sharding.shard_shape(spec.shape))
            axes = {a for part in sharding.spec for a in (part if isinstance(part, tuple) else (part,)) if a}
            stacked = "layers" in self.program.trained.axes[path]
            parameters.append(Parameter(numbers * spec.dtype.itemsize, numbers, self._size(axes & split), stacked))
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


def collective(kind: str, axes: Sequence[str], figures: MeshFigures, operand: float, times: float) -> Collective | None:
    """A collective as the plan tells those of a compiled program; None over one device."""
    members, domains, within = figures.spread(axes)
    if members < 2:
        return None
    if domains == 1:
        link, network = bytes_sent(kind, operand, members), 0.0
    else:
        link = bytes_sent(kind, operand, members) if within > 1 else 0.0
        whole = operand * within if kind == "all-gather" else operand
        network = bytes_sent(kind, whole, domains) / within
    return Collective(
        name="estimate",
        kind=kind,
        axes="+".join(axes),
        size=members,
        times=times,
        operand_bytes=int(operand),
        link_bytes=link,
        network_bytes=network,
        asynchronous=True,
    )


def communication(
    figures: MeshFigures, trace: StepTrace, steps: int, coefficients: Coefficients, pipeline: Pipeline | None = None
) -> list[Collective]:
    """What one device sends in a step of so many microbatches.

    Parameters are gathered for each pass of each microbatch, and their gradients summed where they live; over axes that hold
    copies, gradients are summed whole. Tensor parallelism exchanges the residual stream of each layer. In a pipeline stages do
    so at every tick, and send the residual stream on.
    """
    passes = 3.0 if pipeline is not None and pipeline.recomputes else 2.0
    steps = steps if pipeline is None else pipeline.ticks
    split = [a for a in figures.rules["batch"] if figures.choice.shape.get(a, 1) > 1]
    items: list[Collective | None] = []
    sharded = [a for a in ("fsdp", "expert") if figures.choice.shape.get(a, 1) > 1]
    for group, local in figures.gathered.items():
        axes = sharded if group > 1 else []
        kind = "all-reduce" if coefficients.gathers_by_sums else "all-gather"
        operand = local * group if coefficients.gathers_by_sums else local
        items.append(collective(kind, axes, figures, operand, passes * steps))
        kind = "all-reduce" if coefficients.gathers_by_sums else "reduce-scatter"
        items.append(collective(kind, axes, figures, local * group, 1.0 * steps))
        rest = [a for a in split if a not in axes]
        items.append(collective("all-reduce", rest, figures, local, 1.0 * steps))
    items += _tensor(figures, trace, coefficients, pipeline)
    items += _between_stages(figures, trace, pipeline)
    return [c for c in items if c is not None]


def _between_stages(figures: MeshFigures, trace: StepTrace, pipeline: Pipeline | None) -> Iterator[Collective | None]:
    """The residual stream, and its gradient, from each stage to the next at every tick."""
    if pipeline is not None and trace.stream:
        size = figures.local(trace.stream) / trace.stream[0].layers / pipeline.microbatches
        yield collective("collective-permute", ["pipeline"], figures, size, 2.0 * pipeline.ticks)


def _tensor(
    figures: MeshFigures, trace: StepTrace, coefficients: Coefficients, pipeline: Pipeline | None
) -> Iterator[Collective | None]:
    stream = trace.stream[0] if trace.stream else None
    if stream is None or figures.choice.shape.get("tensor", 1) == 1:
        return
    whole = _whole_stream(figures, trace)
    part = whole / figures.choice.shape["tensor"]
    layers = stream.layers if pipeline is None else stream.layers / pipeline.stages * pipeline.stretch
    if any("tensor" in figures.rules[a] for a in ("activation_embed", "residual_sequence")):
        yield collective("all-gather", ["tensor"], figures, part, coefficients.stream_gathers * layers)
        yield collective("reduce-scatter", ["tensor"], figures, whole, coefficients.stream_scatters * layers)
    else:
        yield collective("all-reduce", ["tensor"], figures, whole, coefficients.stream_sums * layers)


def estimate(
    choice: Choice,
    figures: MeshFigures,
    trace: StepTrace,
    steps: int,
    batch_bytes: float,
    coefficients: Coefficients,
    work: "Work",
) -> Estimate:
    """Memory and roofline of one layout.

    Args:
        choice: the layout.
        figures: of its mesh.
        trace: of the step with its rematerialisation, on the whole batch.
        steps: microbatches.
        batch_bytes: of the whole batch of integers.
        coefficients: of the platform.
        work: of the step.
    """
    pipeline = work.pipeline
    state, learner = figures.state_bytes
    if choice.optimizer_dtype in ("bfloat16", "float16"):
        learner /= 2
    arguments = state + (0.0 if choice.offload_optimizer else learner) + batch_bytes / figures.batch_shards
    activations = work.residual_bytes(figures, trace) / steps
    columns = _columns(figures, trace, steps, pipeline)
    if choice.offload_optimizer:
        columns["gradients"] += 2 * learner  # as it is read, and as it is written back
    temporaries = activations * coefficients.kept + sum(
        coefficients.memory.get(name, 0.0) * size for name, size in columns.items()
    )
    of_layers, rest, _ = figures.parameter_bytes
    weights = of_layers + rest
    traffic = coefficients.traffic_activations * figures.local(trace.layer) * work.of_layers
    traffic += coefficients.traffic_weights * weights * (steps if pipeline is None else pipeline.ticks) + 2 * arguments
    sends = communication(figures, trace, steps, coefficients, pipeline)
    bound = roofline(figures.machine.target, figures.machine.devices, work.executed(trace), traffic, sends)
    host = Host(
        activations=2 * figures.local(trace.kept, offloaded=True),
        optimizer=2 * learner if choice.offload_optimizer else 0.0,
    )
    return Estimate(
        arguments=arguments, kept=activations, columns=columns, temporaries=temporaries, roofline=bound, host=host
    )


@attrs.frozen(kw_only=True)
class Work:
    """What a pipeline makes of the work of a step.

    Attributes:
        pipeline: None without stages.
        layer_flops: of the layers in a step that keeps nothing of them, dtype -> FLOPs of all devices.
        forward_flops: of the layers' forward pass alone, likewise.
    """

    pipeline: Pipeline | None = None
    layer_flops: Mapping[str, float] = {}
    forward_flops: Mapping[str, float] = {}

    @property
    def of_layers(self) -> float:
        """The layers' share of one device, of all layers."""
        return 1.0 if self.pipeline is None else self.pipeline.stretch / self.pipeline.stages

    def executed(self, trace: StepTrace) -> dict[str, float]:
        """dtype -> FLOPs of all devices, as a plan counts them: idle stages compute too, what is outside of stages counts once."""
        if self.pipeline is None:
            return dict(trace.executed)
        executed = {}
        for dtype, flops in trace.executed.items():
            layers = min(self.layer_flops.get(dtype, 0.0), flops)
            again = self.forward_flops.get(dtype, 0.0) if self.pipeline.recomputes else 0.0
            executed[dtype] = (layers + again) * self.pipeline.stretch + flops - layers
        return executed

    def residual_bytes(self, figures: MeshFigures, trace: StepTrace) -> float:
        """Bytes of one device that wait for the backward pass of a batch."""
        if self.pipeline is None:
            return figures.local(trace.kept)
        stream = figures.local(trace.stream) / max(trace.stream[0].layers, 1.0) if trace.stream else 0.0
        inputs = stream / self.pipeline.microbatches * self.pipeline.stored_inputs
        # The batch before and after the stages, with the gradients of both.
        return figures.local(trace.kept) / self.pipeline.stages * self.pipeline.residual_share + inputs + 3 * stream


@attrs.frozen(kw_only=True)
class Host:
    """Bytes of one device to its host's memory and back, in a step."""

    activations: float
    optimizer: float


def with_host(seconds: float, host: Host) -> float:
    """A step with what goes to the host: activations go while it computes, the optimizer's state when gradients are there."""
    return max(seconds, host.activations / HOST_BANDWIDTH) + host.optimizer / HOST_BANDWIDTH


HOST_BANDWIDTH = 25e9
"""Bytes/s of one device to its host's memory: half of a PCIe 4 slot of 16 lanes, in one direction."""


def _whole_stream(figures: MeshFigures, trace: StepTrace) -> float:
    """Bytes of the residual stream of a device's rows as tensor parallelism gathers it; 0 without."""
    if not trace.stream or figures.choice.shape.get("tensor", 1) == 1:
        return 0.0
    return math.prod(trace.stream[0].shape) * COMPUTED_ITEMSIZE / figures.batch_shards


def _columns(figures: MeshFigures, trace: StepTrace, steps: int, pipeline: Pipeline | None) -> dict[str, float]:
    of_layers, rest, stored = figures.parameter_bytes
    count = max((a.layers for a in trace.kept), default=1.0)
    parts = steps if pipeline is None else steps * pipeline.microbatches
    return {
        "layer": figures.local(trace.layer) / count / parts,
        "stream": figures.local(trace.stream) / count / parts,
        "whole_stream": _whole_stream(figures, trace) / parts,
        "weights": of_layers / (count if pipeline is None else count / pipeline.stages),
        "vocabulary": rest,
        "gradients": stored,
        "accumulated": stored if steps > 1 or pipeline is not None else 0.0,
    }
