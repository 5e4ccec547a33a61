"""Estimate the temporaries of a step on pipeline stages: the saved residuals, and the peak on GPUs.

The formulas model the schedules in axlearn_plugins_parallelism and the buffers that XLA keeps alive around their loops. S
denotes the float32 parameters of a device's layers, L the layers of a chunk, T the ticks, M the microbatches, P the stages, x
the residual stream of one microbatch, k the activations that a layer saves for one microbatch (including x), and Z one
parameter of each shape.
"""

from collections.abc import Iterator

from axlearn_plugins_plan.search.pipelines import Pipeline
from axlearn_plugins_plan.search.sizes import Sizes


def residual_bytes(pipeline: Pipeline, sizes: Sizes, chunk: float) -> float:
    """Return the bytes that are saved for the batch's backward pass.

    Args:
        pipeline: The schedule.
        sizes: Sizes for one of its microbatches.
        chunk: Layers per chunk.
    """
    if pipeline.schedule == "1f1b":
        # 2 P - 1 slots for stage inputs, one slot for unneeded values, and the recomputed layers of one microbatch.
        return 2 * pipeline.stages * sizes.stream + chunk * sizes.kept
    if pipeline.rounds == 1:
        return pipeline.ticks * chunk * sizes.kept
    # A chunk is rematerialized as a whole. Each tick saves its input and the tagged activations of its layers.
    return pipeline.ticks * (sizes.stream + chunk * (sizes.kept - sizes.stream))


def peak_terms(pipeline: Pipeline, sizes: Sizes, chunk: float, room: float) -> dict[str, float]:
    """Return the bytes of each live buffer at the peak, by name.

    The peak is in the loss, the backward loop, or the gradient of the embedding. The update needs no temporaries because XLA
    changes the state in place.

    Args:
        pipeline: The schedule.
        sizes: Sizes for one of its microbatches.
        chunk: Layers per chunk.
        room: Bytes available for temporaries. If there is enough room, XLA keeps zeros in memory instead of computing them on
            use.
    """
    residuals = residual_bytes(pipeline, sizes, chunk)
    if pipeline.schedule == "1f1b":
        phases = _one_forward_one_backward(sizes, residuals)
    else:
        phases = [*_after_forward(pipeline, sizes, chunk, residuals, room)]
        if sizes.sharded:
            # The gradient of the stream is gathered over the tensor axis and transposed, then scattered into the table. If FSDP
            # does not shard the table by width, each device scatters into the columns of its own shard instead.
            embedding = 2 * pipeline.microbatches * sizes.whole_stream
            phases.append({"embedding": embedding, "gradients": sizes.layers + sizes.rest})
    return max(phases, key=lambda phase: sum(phase.values()))


def _one_forward_one_backward(sizes: Sizes, residuals: float) -> list[dict[str, float]]:
    """Return the live buffers in a layer's backward pass and between two ticks.

    They include the gradient sums, the tick's gradients, and the zeros that a tick's gradients start from, one per shape. XLA
    unrolls the loop by two. Both halves have zeros, and between them there is a copy of the gradients.
    """
    sums = sizes.layers + sizes.rest
    inside = {
        "kept": residuals,
        "layer": _layer_backward_bytes(sizes),
        "gradients": sums + sizes.layers + 2 * sizes.shapes,
    }
    between = {"kept": residuals, "sent": 2 * sizes.stream, "gradients": sums + 2 * sizes.layers + 2 * sizes.shapes}
    return [inside, between]


def _after_forward(
    pipeline: Pipeline, sizes: Sizes, chunk: float, residuals: float, room: float
) -> Iterator[dict[str, float]]:
    """Yield the live buffers in the loss, in a layer's backward pass, and between two ticks.

    This applies to schedules that run all forward passes first.
    """
    batch = pipeline.microbatches * sizes.stream
    # Chunks slice the layers in a different order than stages store them, so XLA makes a second float32 copy.
    copies = sizes.layers if pipeline.rounds > 1 else 0.0
    # `ends` counts the stages' outputs, the loss's inputs and their gradient. An interleaved schedule needs one more buffer,
    # because it gathers a sharded stream in a different layout. `head` includes float32 gradients and their sum.
    ends = 4 if pipeline.rounds > 1 and sizes.stream < sizes.whole_stream else 3
    yield {"kept": residuals, "ends": ends * batch, "head": 2.5 * sizes.vocabulary, "copies": copies}
    # In the loop, `ends` counts the gradients of the stages' inputs and outputs, and `head` those of the head. A tick slices its
    # activations from the saved ones.
    loop = {"kept": residuals, "ends": 2 * batch, "head": sizes.rest / 4, "tick": chunk * sizes.kept, "copies": copies}
    room_left = 2 * residuals < room  # XLA counts the buffers that a loop fills twice
    # The gradients of the outputs are copied between two ticks because a tick reads and changes them.
    yield loop | _between_ticks(pipeline, sizes, chunk, room_left) | {"ends": 3 * batch}
    # In a layer's backward pass, the gradient sums and the tick's gradients are live. If there is room, so are the zeros that
    # initialize the next tick's gradients.
    if pipeline.rounds == 1:
        yield loop | {"layer": _layer_backward_bytes(sizes), "gradients": (2 + float(room_left)) * sizes.layers}
        return
    # The layers inside a chunk are not rematerialized separately, so all their activations are live together. The chunk's
    # bfloat16 weights and its gradients are live too. For a chunk of one layer, the gradients are added directly to the sums.
    chunk_share = (0.5 if chunk == 1 else 1.5) / pipeline.rounds
    layer = _matmul_bytes(sizes) if chunk == 1 else _layer_backward_bytes(sizes)
    yield loop | {
        "tick": chunk * sizes.saved_without_remat,
        "layer": layer,
        "gradients": (1 + chunk_share) * sizes.layers,
    }


def _between_ticks(pipeline: Pipeline, sizes: Sizes, chunk: float, room_left: bool) -> dict[str, float]:
    """Return the bytes of the gradient sums, and of the zeros that initialize the next tick's gradients.

    If there is room, XLA creates the zeros of the next tick early. They cover all activations of an interleaved chunk. In other
    schedules they coexist with the tick's gradients, which XLA adds to new sums one by one. A chunk of one or two layers is not a
    loop, so its gradients are added immediately.
    """
    if pipeline.rounds > 1:
        tick = sizes.saved_without_remat if room_left and chunk > 1 else sizes.kept
        return {"tick": chunk * tick, "gradients": sizes.layers}
    if not room_left or chunk <= 2:
        return {"gradients": 2 * sizes.layers}
    return {"tick": 0.0, "gradients": 3 * sizes.layers + (1 + float(sizes.sharded)) * sizes.largest}


def _layer_backward_bytes(sizes: Sizes) -> float:
    """Return the bytes of one layer's backward pass, without its saved activations.

    The factors 0.6 and 2 are also used without stages (`figures.toml`).
    """
    return 0.6 * sizes.layer + sizes.stream + _matmul_bytes(sizes)


def _matmul_bytes(sizes: Sizes) -> float:
    """Return the bytes of the weights gathered for this matmul and the next, and of the tensor-parallel buffers.

    Tensor parallelism gathers the stream's gradients in both blocks, and the input of a matmul. It also keeps the sums from
    three matmuls that have not been scattered yet.
    """
    return 2 * sizes.gathered + (6 * sizes.whole_stream if sizes.tensor else 0.0)
