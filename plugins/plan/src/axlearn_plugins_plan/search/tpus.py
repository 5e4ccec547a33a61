"""Estimate the peak memory of temporaries during a step on TPUs.

For each buffer size, the formulas count the buffers that libtpu 0.0.42 assigns at the peak. The counts come from the layouts in
`benchmarks/results/2026-11-26-tpu-memory.md`. libtpu reduces its memory use when memory runs short.
"""

from collections.abc import Sequence

from axlearn_plugins_plan.search.pipelines import Pipeline
from axlearn_plugins_plan.search.sizes import Sizes


def single_stage_peak(sizes: Sizes, layers: float, accumulates: bool, learner: float) -> dict[str, float]:
    """Return the bytes of each live buffer at the peak of a step without stages, by name.

    The peak is in a layer's backward pass, the loss or the update.

    Args:
        sizes: Sizes for one microbatch.
        layers: Number of layers in the model.
        accumulates: Whether gradients are summed over microbatches.
        learner: Bytes of the optimizer state that are loaded from host memory. 0 if the state stays on the device.
    """
    common = {
        "kept": layers * sizes.kept,
        "accumulated": sizes.stored if accumulates else 0.0,
        "rounded": sizes.rounded,  # all copies are made before the loop over layers
    }
    # The logits' gradients, the gathered head, the head's gradient, and the sum of that gradient over microbatches.
    phases = [common | {"ends": sizes.stream, "head": 3 * sizes.head, "logits": sizes.logits}]
    backward = common | {"gradients": sizes.layers, "layer": layer_backward_bytes(sizes)}
    if learner:  # the state of the largest parameter is loaded early
        backward["optimizer"] = sizes.largest * learner / sizes.stored
        phases.append(_update(sizes, learner))
    return max([*phases, backward], key=lambda phase: sum(phase.values()))


def pipeline_peak(
    pipeline: Pipeline, sizes: Sizes, chunk: float, residuals: float, learner: float = 0.0
) -> dict[str, float]:
    """Return the bytes of each live buffer at the peak of a step on pipeline stages, by name.

    The peak is in a layer's backward pass, the loss or the update.

    Args:
        pipeline: The schedule.
        sizes: Sizes for one of its microbatches.
        chunk: Layers per chunk.
        residuals: Bytes that are saved for the batch's backward pass.
        learner: See `single_stage_peak`.
    """
    phases = [*_passes(pipeline, sizes, chunk, residuals), *([_update(sizes, learner)] if learner else ())]
    return max(phases, key=lambda phase: sum(phase.values()))


def _update(sizes: Sizes, learner: float) -> dict[str, float]:
    """Return the live buffers during the update with an offloaded optimizer state.

    The whole state is loaded and then written back. For the largest parameters, both the old and the new state are in memory.
    For the other parameters, part of the state is already written back. A state on the device is updated in place.
    """
    share = sizes.alike / sizes.stored
    return {"gradients": sizes.stored, "optimizer": learner * (2 * share + 1.5 * (1 - share))}


def _passes(pipeline: Pipeline, sizes: Sizes, chunk: float, residuals: float) -> Sequence[dict[str, float]]:
    common = {"kept": residuals, "rounded": sizes.rounded}
    layer = layer_backward_bytes(sizes)
    if pipeline.schedule == "1f1b":
        # Both the gradient sums and the tick's gradients are live. The loss is part of a tick, so it is not a separate phase.
        layer += sizes.stream + 2 * sizes.whole_stream
        return [common | {"layer": layer, "head": sizes.vocabulary, "gradients": 2 * sizes.layers + sizes.rest}]
    # `ends` counts the batch's stream at the stages' inputs and outputs, the gradients of both, and one more in the loss.
    batch = pipeline.microbatches * sizes.stream
    loss = common | {"ends": 5 * batch, "head": 2.5 * sizes.vocabulary}
    loop = common | {"ends": 4 * batch, "layer": layer}
    if pipeline.rounds == 1:
        loop |= {"tick": chunk * sizes.kept, "gradients": 2 * sizes.layers}
    else:  # the layers inside a chunk are not rematerialized separately; a tick holds the gradients of one chunk
        gradients = (1 + 1 / pipeline.rounds) * sizes.layers
        loop |= {"tick": chunk * sizes.saved_without_remat, "head": 2 * sizes.vocabulary, "gradients": gradients}
    return [loss, loop]


def layer_backward_bytes(sizes: Sizes) -> float:
    """Return the bytes of one layer's backward pass, without its saved activations.

    The stream has several buffers, both sharded and gathered over the tensor axis. The experts' routed rows need additional
    buffers. Offloaded activations need two buffers: one in use, and one in transfer.
    """
    streams = 4 * sizes.whole_stream + 1.5 * sizes.stream + 3 * sizes.routed
    return streams + 3 * sizes.hidden + 0.5 * sizes.heads + sizes.gathered + 2 * sizes.offloaded
