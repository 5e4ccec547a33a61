"""Estimate the memory and time of a layout with formulas, from a single trace of the step.

The formulas rank thousands of layouts in seconds without compiling any. An estimate has the same terms as a compiled program
(FLOPs, bytes to and from memory, collectives by mesh axes), so the same roofline and prediction apply to both. A few
coefficients per platform model the compiler's buffers and memory traffic (`figures.toml`). They were chosen by hand to match
compiled layouts. For TPUs, and for pipelines on GPUs, memory is estimated for each phase of a step (`tpus.py`, `stages.py`).
Trainium uses the GPU coefficients, which have not been checked against compiled layouts.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import attrs

from axlearn_core.contracts.target import Target
from axlearn_plugins_plan.collectives import Collective, bytes_sent
from axlearn_plugins_plan.roofline import Roofline, roofline
from axlearn_plugins_plan.search.figures import Coefficients
from axlearn_plugins_plan.search.mesh_figures import MeshFigures, whole_stream
from axlearn_plugins_plan.search.pipelines import Pipeline
from axlearn_plugins_plan.search.sizes import compute_sizes, count_layers
from axlearn_plugins_plan.search.space import Choice
from axlearn_plugins_plan.search.stages import peak_terms, residual_bytes
from axlearn_plugins_plan.search.tpus import pipeline_peak, single_stage_peak
from axlearn_plugins_plan.search.trace import StepTrace

COLUMNS = ("layer", "stream", "whole_stream", "weights", "vocabulary", "gradients", "accumulated", "offloaded")


@attrs.frozen(kw_only=True)
class Estimate:
    """The estimated figures of one layout, per device.

    Attributes:
        arguments: Bytes of the training state and the batch. This number is exact.
        kept: Bytes that the forward pass saves for the backward pass.
        columns: Bytes of each column in `COLUMNS`; `figures.toml` has the coefficients. On platforms that are estimated by phase,
            bytes that add up to `temporaries`.
        temporaries: Bytes of buffers that exist only during the step.
        roofline: Roofline of the step.
        host: Transfers to and from host memory.
    """

    arguments: float
    kept: float
    columns: Mapping[str, float]
    temporaries: float
    roofline: Roofline
    host: "Host"

    @property
    def total(self) -> float:
        """Total bytes."""
        return self.arguments + self.temporaries


def collective(kind: str, axes: Sequence[str], figures: MeshFigures, operand: float, times: float) -> Collective | None:
    """Build a collective like those read from a compiled program. Return None for a group of one device."""
    members, domains, within = figures.spread(axes)
    if members < 2:
        return None
    if domains == 1:
        link, network = bytes_sent(kind, operand, members), 0.0
    else:
        link = bytes_sent(kind, operand, members) if within > 1 else 0.0
        domain_operand = operand * within if kind == "all-gather" else operand
        network = bytes_sent(kind, domain_operand, domains) / within
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
    """Return the collectives that one device runs in a step.

    Each pass of each microbatch gathers the parameters, and a reduce-scatter sums their gradients. Over axes that replicate the
    parameters, the gradients are all-reduced. Tensor parallelism exchanges the residual stream in each layer. In a pipeline,
    the stages do all of this at every tick, and send the residual stream to the next stage.

    Args:
        figures: Figures of the mesh.
        trace: Trace of the step on the whole batch.
        steps: Microbatches per step.
        coefficients: Coefficients of the platform.
        pipeline: The schedule, or None without stages.
    """
    passes = 3.0 if pipeline is not None and pipeline.recomputes else 2.0
    steps = steps if pipeline is None else pipeline.ticks
    split = [a for a in figures.token_axes if figures.choice.shape.get(a, 1) > 1]
    items: list[Collective | None] = []
    sharded = [a for a in split if a in (*figures.rules["embed"], *figures.rules["experts"])]
    for group, local in figures.gathered_bytes.items():
        axes = sharded if group > 1 else []
        kind = "all-reduce" if coefficients.gathers_by_sums else "all-gather"
        operand = local * group if coefficients.gathers_by_sums else local
        items.append(collective(kind, axes, figures, operand, passes * steps))
        kind = "all-reduce" if coefficients.gathers_by_sums else "reduce-scatter"
        items.append(collective(kind, axes, figures, local * group, 1.0 * steps))
        replicated = [a for a in split if a not in axes]
        items.append(collective("all-reduce", replicated, figures, local, 1.0 * steps))
    items += _tensor(figures, trace, coefficients, pipeline)
    items += _between_stages(figures, trace, pipeline)
    return [c for c in items if c is not None]


def _between_stages(figures: MeshFigures, trace: StepTrace, pipeline: Pipeline | None) -> Iterator[Collective | None]:
    """Yield the transfers of the residual stream and its gradient between stages at every tick."""
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
    """Estimate the memory and roofline of one layout.

    Args:
        choice: The layout.
        figures: Figures of its mesh.
        trace: Trace of the step with the layout's rematerialization, on the whole batch.
        steps: Microbatches per step.
        batch_bytes: Bytes of the whole batch, which consists of integers.
        coefficients: Coefficients of the platform.
        work: How the pipeline changes the FLOPs of a step.
    """
    pipeline = work.pipeline
    state, learner = figures.state_bytes
    if choice.optimizer_dtype in ("bfloat16", "float16"):
        learner /= 2
    offloaded = learner if choice.offload_optimizer or figures.offloads_optimizer else 0.0
    arguments = state + learner - offloaded + batch_bytes / figures.batch_shards
    if pipeline is not None:
        activations, columns = _pipeline_columns(
            figures, trace, coefficients, work, pipeline, state + learner - offloaded, offloaded
        )
        temporaries = sum(columns.values())
    elif coefficients.phases:
        activations = figures.local(trace.kept) / steps
        sizes = compute_sizes(figures, trace, work.full_trace, steps)
        columns = single_stage_peak(sizes, count_layers(trace), steps > 1, offloaded)
        temporaries = sum(columns.values())
    else:
        activations = figures.local(trace.kept) / steps
        columns = _columns(figures, trace, steps) | {
            "offloaded": 2 * offloaded
        }  # one buffer for reading and one for writing back
        factors = coefficients.memory
        temporaries = activations + sum(factors.get(name, 0.0) * size for name, size in columns.items())
    layer_bytes, other_bytes, _ = figures.parameter_bytes
    weights = layer_bytes + other_bytes
    traffic = coefficients.traffic_activations * figures.local(trace.layer) * work.layer_share
    traffic += coefficients.traffic_weights * weights * (steps if pipeline is None else pipeline.ticks) + 2 * arguments
    sends = communication(figures, trace, steps, coefficients, pipeline)
    bound = roofline(figures.machine.target, figures.machine.devices, work.executed_flops(trace), traffic, sends)
    host = Host(
        activations=2 * figures.local(trace.kept, offloaded=True),
        optimizer=2 * offloaded,
    )
    return Estimate(
        arguments=arguments, kept=activations, columns=columns, temporaries=temporaries, roofline=bound, host=host
    )


@attrs.frozen(kw_only=True)
class Work:
    """How a pipeline changes the FLOPs of a step.

    Attributes:
        pipeline: The schedule, or None without stages.
        full_trace: Trace of the step without recomputation in the layers.
        layer_flops: dtype -> FLOPs in the layers on all devices, for a step that recomputes all layers.
        forward_flops: dtype -> FLOPs in the layers' forward pass on all devices.
    """

    pipeline: Pipeline | None = None
    full_trace: StepTrace = StepTrace(executed_flops={}, kept=(), layer=())
    layer_flops: Mapping[str, float] = {}
    forward_flops: Mapping[str, float] = {}

    @property
    def layer_share(self) -> float:
        """Share of all layers that one device computes, including idle ticks."""
        return 1.0 if self.pipeline is None else self.pipeline.stretch / self.pipeline.stages

    def executed_flops(self, trace: StepTrace) -> dict[str, float]:
        """Return the FLOPs on all devices by dtype, counted as in a plan.

        Idle stages compute too. Work outside the stages counts once.
        """
        if self.pipeline is None:
            return dict(trace.executed_flops)
        executed = {}
        for dtype, flops in trace.executed_flops.items():
            layers = min(self.layer_flops.get(dtype, 0.0), flops)
            again = self.forward_flops.get(dtype, 0.0) if self.pipeline.recomputes else 0.0
            executed[dtype] = (layers + again) * self.pipeline.stretch + flops - layers
        return executed


@attrs.frozen(kw_only=True)
class Host:
    """Bytes that a device moves to and from host memory in a step."""

    activations: float
    optimizer: float

    def fits(self, target: Target) -> bool:
        """Return True if the data fits in host memory, or if the size of the host memory is unknown."""
        return target.host_bytes is None or (self.activations + self.optimizer) / 2 <= HOST_SHARE * target.host_bytes


def with_host(seconds: float, host: Host) -> float:
    """Return the time of a step including host transfers.

    Activations move to the host during the forward pass and return during the backward pass, which takes twice as long. The
    optimizer state moves after the gradients are ready, so its transfer does not overlap with compute.
    """
    one_way = host.activations / 2 / HOST_BANDWIDTH
    return max(seconds / 3, one_way) + max(seconds * 2 / 3, one_way) + host.optimizer / HOST_BANDWIDTH


HOST_SHARE = 0.8
"""Share of host memory for offloaded data. The remainder is for the program, its input and checkpoints."""
HOST_BANDWIDTH = 25e9
"""Bytes/s between one device and host memory: half of a PCIe 4 x16 slot, in one direction."""


def _pipeline_columns(
    figures: MeshFigures,
    trace: StepTrace,
    coefficients: Coefficients,
    work: "Work",
    pipeline: Pipeline,
    state: float,
    offloaded: float,
) -> tuple[float, dict[str, float]]:
    """Return the bytes saved for the backward pass, and the bytes of all temporaries at the peak by name."""
    sizes = compute_sizes(figures, trace, work.full_trace, pipeline.microbatches, pipeline)
    chunk = count_layers(trace) / pipeline.chunks
    activations = residual_bytes(pipeline, sizes, chunk)
    if coefficients.phases:
        return activations, pipeline_peak(pipeline, sizes, chunk, activations, offloaded)
    # XLA schedules and rematerializes to stay within 95% of 80% of a GPU's memory.
    room = 0.95 * 0.8 * (figures.machine.target.hbm_bytes or math.inf) - state
    peak = peak_terms(pipeline, sizes, chunk, room)
    return activations, peak | ({"offloaded": 2 * offloaded} if offloaded else {})


def _columns(figures: MeshFigures, trace: StepTrace, steps: int) -> dict[str, float]:
    layer_bytes, other_bytes, stored = figures.parameter_bytes
    count = max((a.layers for a in trace.kept), default=1.0)
    tensor = figures.choice.shape.get("tensor", 1) > 1  # tensor parallelism gathers the stream
    return {
        "layer": figures.local(trace.layer) / count / steps,
        "stream": figures.local(trace.stream) / count / steps,
        "whole_stream": whole_stream(figures, trace) / steps if tensor else 0.0,
        "weights": layer_bytes / count,
        "vocabulary": other_bytes,
        "gradients": stored,
        "accumulated": stored if steps > 1 else 0.0,
    }
