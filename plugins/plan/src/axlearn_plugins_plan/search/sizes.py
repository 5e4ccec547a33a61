"""Bytes of one device that the phases of a step's memory are computed from."""

import attrs

from axlearn_plugins_plan.search.on_mesh import COMPUTED_ITEMSIZE, MeshFigures, whole_stream
from axlearn_plugins_plan.search.pipelines import Pipeline
from axlearn_plugins_plan.search.trace import StepTrace


@attrs.frozen(kw_only=True)
class Sizes:
    """Bytes on one device, of one microbatch where it is of activations.

    Attributes:
        stream: the residual stream between two layers: x.
        whole_stream: the same over the whole width and length.
        kept: what a layer keeps for its backward pass, its input among it: k.
        everything: what a layer keeps where nothing is computed again.
        layer: what it computes under a tag.
        hidden: of that the largest between the products of a feed-forward network.
        heads: of that the largest with heads of attention.
        routed: the stream as experts take it, a row for each that is chosen; 0 without experts.
        offloaded: what a layer keeps in the host's memory.
        layers: parameters of the layers as they are stored: S.
        rounded: copies of these in the precision that layers compute in; 0 where they are stored in it.
        shapes: of the layers' parameters one of each shape: Z.
        largest: the largest of them, of all layers; where it is gathered, it stands there in another layout too.
        alike: all parameters that are as large.
        sharded: whether parameters are gathered to compute.
        rest: all other parameters.
        gathered: parameters of one layer as they compute.
        vocabulary: all other parameters, likewise.
        head: of these the largest, by which the stream becomes logits.
        logits: of a microbatch.
        tensor: whether tensor parallelism splits products.
    """

    stream: float
    whole_stream: float
    kept: float
    everything: float
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
        """All parameters, or their gradients."""
        return self.layers + self.rest


def layers_of(trace: StepTrace) -> float:
    """How many layers the model has, of those that keep something."""
    return max((a.layers for a in trace.kept), default=1.0)


def sizes_of(
    figures: MeshFigures,
    trace: StepTrace,
    recomputing_nothing: StepTrace,
    microbatches: int,
    pipeline: Pipeline | None = None,
) -> Sizes:
    """The sizes of a layout.

    Args:
        figures: of the mesh.
        trace: of the step on the whole batch.
        recomputing_nothing: of the same step without rematerialisation.
        microbatches: of the batch.
        pipeline: the schedule; None on one stage.
    """
    count = layers_of(trace)
    one = count * microbatches
    activations = trace.kept
    if pipeline is not None and pipeline.rounds > 1 and trace.kept == recomputing_nothing.kept:
        activations = trace.tagged  # which a chunk keeps where nothing says what to
    elif pipeline is not None and pipeline.rounds > 1 and count > pipeline.chunks:
        activations = trace.distinct  # JAX rounds only what the chunk as a whole saves
    # What is repeated is merged where it is saved; what is computed again has it in the layouts of both of its users.
    everything = recomputing_nothing.distinct if any(a.repeated for a in trace.kept) else recomputing_nothing.kept
    of_layers, vocabulary, stored = figures.parameter_bytes
    of_stack = figures.stacked
    whole = whole_stream(figures, trace) / microbatches
    head = max((p.gathered for p in figures.parameters if not p.stacked), default=0.0)
    width = trace.stream[0].shape[-1] if trace.stream else 0
    return Sizes(
        stream=figures.local(trace.stream) / one,
        whole_stream=whole,
        kept=figures.local(activations) / one,
        everything=figures.local(everything) / one,
        layer=figures.local(trace.layer) / one,
        hidden=figures.local(trace.hidden) / one,
        heads=figures.local(trace.heads) / one,
        routed=figures.local(trace.routed_stream) / one,
        offloaded=figures.local(trace.kept, offloaded=True) / one,
        layers=of_stack.stored,
        rounded=of_stack.rounded,
        shapes=of_stack.shapes,
        largest=of_stack.largest,
        alike=of_stack.alike,
        sharded=of_stack.sharded,
        rest=stored - of_stack.stored,
        gathered=of_layers / (count / (pipeline.stages if pipeline is not None else 1)),
        vocabulary=vocabulary,
        head=head,
        # (tokens, width) times (width, vocabulary), both of which have this itemsize, as their product has
        logits=whole * head / (COMPUTED_ITEMSIZE * width**2) if width else 0.0,
        tensor=figures.choice.shape.get("tensor", 1) > 1,
    )
