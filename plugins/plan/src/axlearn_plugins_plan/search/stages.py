"""What a step on pipeline stages takes of memory beside its arguments: what waits for its backward pass, and on GPUs the peak.

Written from the schedules as they run (axlearn_plugins_parallelism) and from what XLA keeps alive around their loops. S are the
float32 parameters of a device's layers, L the layers of a chunk, T the ticks, M the microbatches, P the stages, x the residual
stream of one microbatch, k what a layer keeps of one microbatch (x among it), Z one of the parameters of each shape.
"""

from collections.abc import Iterator

from axlearn_plugins_plan.search.pipelines import Pipeline
from axlearn_plugins_plan.search.sizes import Sizes


def waiting(pipeline: Pipeline, sizes: Sizes, chunk: float) -> float:
    """Bytes that wait for the backward pass of the batch.

    Args:
        pipeline: the schedule.
        sizes: of its microbatches.
        chunk: layers of a chunk.
    """
    if pipeline.schedule == "1f1b":
        # Inputs of stages in 2 P - 1 slots and one for what nobody needs; the layers of one microbatch, computed again.
        return 2 * pipeline.stages * sizes.stream + chunk * sizes.kept
    if pipeline.rounds == 1:
        return pipeline.ticks * chunk * sizes.kept
    # A chunk is rematerialised as a whole: of each tick its input stays, and of its layers what has the tags to save.
    return pipeline.ticks * (sizes.stream + chunk * (sizes.kept - sizes.stream))


def terms(pipeline: Pipeline, sizes: Sizes, chunk: float, room: float) -> dict[str, float]:
    """Name -> bytes of all that is alive at the peak: in the loss, the backward loop, or the embedding's gradient.

    The update is none: XLA changes the state in place.

    Args:
        pipeline: the schedule.
        sizes: of its microbatches.
        chunk: layers of a chunk.
        room: bytes for temporaries below which XLA keeps zeros in memory instead of computing them where they are needed.
    """
    residuals = waiting(pipeline, sizes, chunk)
    if pipeline.schedule == "1f1b":
        phases = _one_forward_one_backward(sizes, residuals)
    else:
        phases = [*_after_forward(pipeline, sizes, chunk, residuals, room)]
        if sizes.sharded:
            # The gradient of the stream is gathered over tensor parallelism, and transposed, for the scatter into the table. Where
            # the table's width is not split over FSDP, each device scatters into the columns that its part of the stream has.
            embedding = 2 * pipeline.microbatches * sizes.whole_stream
            phases.append({"embedding": embedding, "gradients": sizes.layers + sizes.rest})
    return max(phases, key=lambda phase: sum(phase.values()))


def _one_forward_one_backward(sizes: Sizes, residuals: float) -> list[dict[str, float]]:
    """In a layer's backward pass, and between two ticks.

    There are the sums of the gradients, those of the tick, and the zeros where a tick's begin, one of each shape. XLA unrolls the
    loop by two: both halves have such zeros, and between them stands a copy as large as the gradients.
    """
    sums = sizes.layers + sizes.rest
    inside = {"kept": residuals, "layer": _one_layer(sizes), "gradients": sums + sizes.layers + 2 * sizes.shapes}
    between = {"kept": residuals, "sent": 2 * sizes.stream, "gradients": sums + 2 * sizes.layers + 2 * sizes.shapes}
    return [inside, between]


def _after_forward(
    pipeline: Pipeline, sizes: Sizes, chunk: float, residuals: float, room: float
) -> Iterator[dict[str, float]]:
    """In the loss, in a layer's backward pass, and between two ticks, where all microbatches have gone forward before."""
    batch = pipeline.microbatches * sizes.stream
    # Chunks are cut from layers in another order than stages store them: a second float32 copy.
    copies = sizes.layers if pipeline.rounds > 1 else 0.0
    # What comes out of the stages, what the loss computes with, and its gradient; the head, with float32 gradients and their sum.
    # Of an interleaved schedule one more, where tensor parallelism splits it: it is gathered in another layout than it is stored.
    ends = 4 if pipeline.rounds > 1 and sizes.stream < sizes.whole_stream else 3
    yield {"kept": residuals, "ends": ends * batch, "head": 2.5 * sizes.vocabulary, "copies": copies}
    # The gradients of what comes in and goes out of the stages, and of the head. What a tick needs is cut out of what all keep.
    loop = {"kept": residuals, "ends": 2 * batch, "head": sizes.rest / 4, "tick": chunk * sizes.kept, "copies": copies}
    room_left = 2 * residuals < room  # XLA counts what a loop fills twice
    # Between two ticks the outputs' gradients are copied, as a tick reads and changes them.
    yield loop | _between_ticks(pipeline, sizes, chunk, room_left) | {"ends": 3 * batch}
    if pipeline.rounds == 1:  # the sums, those of the tick, and where there is room the next tick's zeros
        yield loop | {"layer": _one_layer(sizes), "gradients": (2 + float(room_left)) * sizes.layers}
        return
    # The layers of a chunk run without rematerialisation of their own: all that they compute is there together. Beside the sums
    # are the chunk's weights in bfloat16, and its gradients: where it is one layer, these go straight into the sums.
    chunk_share = (0.5 if chunk == 1 else 1.5) / pipeline.rounds
    layer = _products(sizes) if chunk == 1 else _one_layer(sizes)
    yield loop | {"tick": chunk * sizes.everything, "layer": layer, "gradients": (1 + chunk_share) * sizes.layers}


def _between_ticks(pipeline: Pipeline, sizes: Sizes, chunk: float, room_left: bool) -> dict[str, float]:
    """The sums, and zeros where the next tick's gradients begin.

    Where there is room, the next tick's zeros are made early: of all that the layers of an interleaved chunk compute, or beside
    the gradients of the tick, which are added one by one to new sums. Two layers are no loop: theirs are added as they are made.
    """
    if pipeline.rounds > 1:
        tick = sizes.everything if room_left and chunk > 1 else sizes.kept
        return {"tick": chunk * tick, "gradients": sizes.layers}
    if not room_left or chunk <= 2:
        return {"gradients": 2 * sizes.layers}
    return {"tick": 0.0, "gradients": 3 * sizes.layers + (1 + float(sizes.sharded)) * sizes.largest}


def _one_layer(sizes: Sizes) -> float:
    """The backward pass of one layer, beside what is kept of it; 0.6 and 2 are those of steps without stages (`figures.toml`)."""
    return 0.6 * sizes.layer + sizes.stream + _products(sizes)


def _products(sizes: Sizes) -> float:
    """Weights gathered for this and the next product, and what tensor parallelism gathers and has not scattered yet.

    It gathers the stream's gradients of the two blocks and the input of a product, and has the sums of three products to scatter.
    """
    return 2 * sizes.gathered + (6 * sizes.whole_stream if sizes.tensor else 0.0)
