"""Memory and time of a layout by formulas, from one trace of the step: thousands in seconds, nothing compiled.

The work of a step is told in the same terms as that of a compiled program (FLOPs, bytes to and from memory, collectives by mesh
axes), so that one roofline and one prediction serve both. What formulas cannot know, the compiler's own buffers and passes over
memory, has a few coefficients for each platform (`figures.toml`), chosen by hand beside compiled layouts. The memory of TPUs, and
of pipelines on GPUs, is that of phases (`tpus.py`, `stages.py`). Trainium's coefficients are copies of the GPUs', which no compiled
layout has checked.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import attrs

from axlearn_core.contracts.target import Target
from axlearn_plugins_plan.collectives import Collective, bytes_sent
from axlearn_plugins_plan.roofline import Roofline, roofline
from axlearn_plugins_plan.search.figures import Coefficients
from axlearn_plugins_plan.search.on_mesh import MeshFigures, whole_stream
from axlearn_plugins_plan.search.pipelines import Pipeline
from axlearn_plugins_plan.search.sizes import layers_of, sizes_of
from axlearn_plugins_plan.search.space import Choice
from axlearn_plugins_plan.search.stages import terms, waiting
from axlearn_plugins_plan.search.tpus import on_one_stage, on_stages
from axlearn_plugins_plan.search.trace import StepTrace

COLUMNS = ("layer", "stream", "whole_stream", "weights", "vocabulary", "gradients", "accumulated", "offloaded")


@attrs.frozen(kw_only=True)
class Estimate:
    """What formulas say of one layout, of one device.

    Attributes:
        arguments: bytes of the training state and the batch; exact.
        kept: bytes of what the forward pass leaves for the backward pass.
        columns: bytes of each of `COLUMNS`, whose coefficients stand in `figures.toml`; of phases those that add up to
            `temporaries`.
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
    whole = whole_stream(figures, trace)
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
    offloaded = learner if choice.offload_optimizer or figures.offloads_optimizer else 0.0
    arguments = state + learner - offloaded + batch_bytes / figures.batch_shards
    if pipeline is not None:
        activations, columns = _on_stages(
            figures, trace, coefficients, work, pipeline, state + learner - offloaded, offloaded
        )
        temporaries = sum(columns.values())
    elif coefficients.phases:
        activations = figures.local(trace.kept) / steps
        sizes = sizes_of(figures, trace, work.everything, steps)
        columns = on_one_stage(sizes, layers_of(trace), steps > 1, offloaded)
        temporaries = sum(columns.values())
    else:
        activations = figures.local(trace.kept) / steps
        columns = _columns(figures, trace, steps) | {
            "offloaded": 2 * offloaded
        }  # as it is read, and as it is written back
        factors = coefficients.memory
        temporaries = activations + sum(factors.get(name, 0.0) * size for name, size in columns.items())
    of_layers, rest, _ = figures.parameter_bytes
    weights = of_layers + rest
    traffic = coefficients.traffic_activations * figures.local(trace.layer) * work.of_layers
    traffic += coefficients.traffic_weights * weights * (steps if pipeline is None else pipeline.ticks) + 2 * arguments
    sends = communication(figures, trace, steps, coefficients, pipeline)
    bound = roofline(figures.machine.target, figures.machine.devices, work.executed(trace), traffic, sends)
    host = Host(
        activations=2 * figures.local(trace.kept, offloaded=True),
        optimizer=2 * offloaded,
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
        everything: of the step whose layers compute nothing again.
    """

    pipeline: Pipeline | None = None
    everything: StepTrace = StepTrace(executed={}, kept=(), layer=())
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


@attrs.frozen(kw_only=True)
class Host:
    """Bytes of one device to its host's memory and back, in a step."""

    activations: float
    optimizer: float

    def fits(self, target: Target) -> bool:
        """Whether the host's memory holds it; where that is not known, nothing says that it does not."""
        return target.host_bytes is None or (self.activations + self.optimizer) / 2 <= HOST_SHARE * target.host_bytes


def with_host(seconds: float, host: Host) -> float:
    """A step with what goes to the host and back.

    Activations go during the forward pass and come back during the backward pass, which takes twice as long; the optimizer's state
    goes when gradients are there.
    """
    one_way = host.activations / 2 / HOST_BANDWIDTH
    return max(seconds / 3, one_way) + max(seconds * 2 / 3, one_way) + host.optimizer / HOST_BANDWIDTH


HOST_SHARE = 0.8
"""Of a host's memory, for what devices keep there; the rest is for the program, its input and checkpoints."""
HOST_BANDWIDTH = 25e9
"""Bytes/s of one device to its host's memory: half of a PCIe 4 slot of 16 lanes, in one direction."""


def _on_stages(
    figures: MeshFigures,
    trace: StepTrace,
    coefficients: Coefficients,
    work: "Work",
    pipeline: Pipeline,
    state: float,
    offloaded: float,
) -> tuple[float, dict[str, float]]:
    """(bytes that wait for the backward pass, those of all temporaries at the peak by name)."""
    sizes = sizes_of(figures, trace, work.everything, pipeline.microbatches, pipeline)
    chunk = layers_of(trace) / pipeline.chunks
    activations = waiting(pipeline, sizes, chunk)
    if coefficients.phases:
        return activations, on_stages(pipeline, sizes, chunk, activations, offloaded)
    # XLA schedules and rematerialises for this share of a GPU's memory: 80%, of which 95%.
    room = 0.95 * 0.8 * (figures.machine.target.hbm_bytes or math.inf) - state
    peak = terms(pipeline, sizes, chunk, room)
    return activations, peak | ({"offloaded": 2 * offloaded} if offloaded else {})


def _columns(figures: MeshFigures, trace: StepTrace, steps: int) -> dict[str, float]:
    of_layers, rest, stored = figures.parameter_bytes
    count = max((a.layers for a in trace.kept), default=1.0)
    tensor = figures.choice.shape.get("tensor", 1) > 1  # which gathers the stream
    return {
        "layer": figures.local(trace.layer) / count / steps,
        "stream": figures.local(trace.stream) / count / steps,
        "whole_stream": whole_stream(figures, trace) / steps if tensor else 0.0,
        "weights": of_layers / count,
        "vocabulary": rest,
        "gradients": stored,
        "accumulated": stored if steps > 1 else 0.0,
    }
