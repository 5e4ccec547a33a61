"""Compute the per-device buffer sizes that the memory formulas use."""

import attrs

from axlearn_plugins_plan.search.mesh_figures import COMPUTED_ITEMSIZE, MeshFigures, whole_stream
from axlearn_plugins_plan.search.pipelines import Pipeline
from axlearn_plugins_plan.search.trace import StepTrace


@attrs.frozen(kw_only=True)
class Sizes:
    """Bytes on one device. Activations are for one microbatch.

    Attributes:
        stream: Residual stream between two layers (x).
        whole_stream: Full-width residual stream, whose sequence is sharded only by context parallelism.
        kept: Activations that a layer saves for its backward pass, including its input (k).
        saved_without_remat: Activations that a layer saves without recomputation.
        layer: Tagged activations of a layer.
        hidden: Largest tagged activation between the matmuls of a feed-forward network.
        heads: Largest tagged activation with attention heads.
        routed: Residual stream with one row per chosen expert. 0 without experts.
        offloaded: Activations that a layer saves in host memory.
        layers: Stored parameters of the layers (S).
        rounded: Copies of the layers' parameters in the compute precision. 0 if they are stored in that precision.
        shapes: One parameter of the layers for each shape (Z).
        largest: Largest parameter across all layers. If it is gathered, there is a second copy in a different layout.
        alike: All parameters that are as large as `largest`.
        sharded: Whether parameters are gathered for compute.
        rest: All other stored parameters.
        gathered: Gathered parameters of one layer.
        vocabulary: All other gathered parameters.
        head: The largest parameter in `vocabulary`, which maps the residual stream to logits.
        logits: Logits.
        tensor: Whether tensor parallelism shards matmuls.
    """

    stream: float
    whole_stream: float
    kept: float
    saved_without_remat: float
    layer: float
    hidden: float = 0.0
    heads: float = 0.0
    routed: float = 0.0
    offloaded: float = 0.0
    layers: float
    rounded: float = 0.0
    shapes: float
    largest: float
    alike: float = 0.0
    sharded: bool
    rest: float
    gathered: float
    vocabulary: float
    head: float = 0.0
    logits: float = 0.0
    tensor: bool

    @property
    def stored(self) -> float:
        """All stored parameters. Their gradients have the same size."""
        return self.layers + self.rest


def count_layers(trace: StepTrace) -> float:
    """Return the number of layers that save activations."""
    return max((a.layers for a in trace.kept), default=1.0)


def compute_sizes(
    figures: MeshFigures,
    trace: StepTrace,
    recomputing_nothing: StepTrace,
    microbatches: int,
    pipeline: Pipeline | None = None,
) -> Sizes:
    """Compute the sizes of a layout.

    Args:
        figures: Figures of the mesh.
        trace: Trace of the step on the whole batch.
        recomputing_nothing: Trace of the same step without rematerialization.
        microbatches: Microbatches per step.
        pipeline: The schedule, or None without stages.
    """
    count = count_layers(trace)
    divisor = count * microbatches
    activations = trace.kept
    if pipeline is not None and pipeline.rounds > 1 and trace.kept == recomputing_nothing.kept:
        activations = trace.tagged_activations  # a chunk without a policy saves the tagged activations
    elif pipeline is not None and pipeline.rounds > 1 and count > pipeline.chunks:
        activations = trace.distinct  # JAX rounds only the residuals of the whole chunk
    # XLA merges saved duplicates. A recomputed duplicate has a copy in the layout of each of its users.
    without_remat = recomputing_nothing.distinct if any(a.repeated for a in trace.kept) else recomputing_nothing.kept
    layer_bytes, vocabulary, stored = figures.parameter_bytes
    stacked = figures.layer_parameters
    full_stream = whole_stream(figures, trace) / microbatches
    head = max((p.gathered_bytes for p in figures.parameters if not p.has_layer_axis), default=0.0)
    width = trace.stream[0].shape[-1] if trace.stream else 0
    return Sizes(
        stream=figures.local(trace.stream) / divisor,
        whole_stream=full_stream,
        kept=figures.local(activations) / divisor,
        saved_without_remat=figures.local(without_remat) / divisor,
        layer=figures.local(trace.layer) / divisor,
        hidden=figures.local(trace.hidden) / divisor,
        heads=figures.local(trace.heads) / divisor,
        routed=figures.local(trace.routed_stream) / divisor,
        offloaded=figures.local(trace.kept, offloaded=True) / divisor,
        layers=stacked.stored,
        rounded=stacked.rounded,
        shapes=stacked.shapes,
        largest=stacked.largest,
        alike=stacked.alike,
        sharded=stacked.sharded,
        rest=stored - stacked.stored,
        gathered=layer_bytes / (count / (pipeline.stages if pipeline is not None else 1)),
        vocabulary=vocabulary,
        head=head,
        # (tokens, width) times (width, vocabulary); the operands and the result have the same itemsize
        logits=full_stream * head / (COMPUTED_ITEMSIZE * width**2) if width else 0.0,
        tensor=figures.choice.shape.get("tensor", 1) > 1,
    )
