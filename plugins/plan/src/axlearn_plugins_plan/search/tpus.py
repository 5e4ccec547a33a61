"""What a step on TPUs takes of a device's memory beside its arguments: the most that is alive at one time.

Written from the buffers that libtpu 0.0.42 lays out for the layouts of `benchmarks/results/2026-11-26-tpu-memory.md`: how many
of each size are there when they take most. Where memory is short libtpu makes do with less.
"""

from collections.abc import Sequence

from axlearn_plugins_plan.search.pipelines import Pipeline
from axlearn_plugins_plan.search.sizes import Sizes


def on_one_stage(sizes: Sizes, layers: float, accumulates: bool, learner: float) -> dict[str, float]:
    """Name -> bytes of all that is alive at the peak of a step without stages: in a layer's backward pass, the loss or the update.

    Args:
        sizes: of a microbatch.
        layers: of the model.
        accumulates: whether gradients are summed over microbatches.
        learner: bytes of the optimizer's state that come from the host's memory, 0 where they stay on the device.
    """
    both = {
        "kept": layers * sizes.kept,
        "accumulated": sizes.stored if accumulates else 0.0,
        "rounded": sizes.rounded,  # before the loop over layers, all at once
    }
    # The logits' gradients, and the head: gathered, its gradient, and that as it is summed.
    phases = [both | {"ends": sizes.stream, "head": 3 * sizes.head, "logits": sizes.logits}]
    backward = both | {"gradients": sizes.layers, "layer": one_layer(sizes)}
    if learner:  # of which that of the largest parameter comes early
        backward["optimizer"] = sizes.largest * learner / sizes.stored
        phases.append(_update(sizes, learner))
    return max([*phases, backward], key=lambda phase: sum(phase.values()))


def on_stages(pipeline: Pipeline, sizes: Sizes, chunk: float, waiting: float, learner: float = 0.0) -> dict[str, float]:
    """The same on pipeline stages: in a layer's backward pass, the loss or the update.

    Args:
        pipeline: the schedule.
        sizes: of its microbatches.
        chunk: layers of a chunk.
        waiting: bytes that wait for the backward pass of the batch.
        learner: as on one stage.
    """
    phases = [*_passes(pipeline, sizes, chunk, waiting), *([_update(sizes, learner)] if learner else ())]
    return max(phases, key=lambda phase: sum(phase.values()))


def _update(sizes: Sizes, learner: float) -> dict[str, float]:
    """All of an offloaded optimizer's state comes, and goes back as it is done.

    Of the largest parameters both are there, of the others a part is gone. A state on the device is changed in place.
    """
    share = sizes.alike / sizes.stored
    return {"gradients": sizes.stored, "optimizer": learner * (2 * share + 1.5 * (1 - share))}


def _passes(pipeline: Pipeline, sizes: Sizes, chunk: float, waiting: float) -> Sequence[dict[str, float]]:
    both = {"kept": waiting, "rounded": sizes.rounded}
    layer = one_layer(sizes)
    if pipeline.schedule == "1f1b":  # the sums of the gradients and those of the tick; the loss is a part of a tick
        layer += sizes.stream + 2 * sizes.whole_stream
        return [both | {"layer": layer, "head": sizes.vocabulary, "gradients": 2 * sizes.layers + sizes.rest}]
    # The stream of the batch as it goes into the stages and comes out, and the gradients of both; in the loss once more.
    batch = pipeline.microbatches * sizes.stream
    loss = both | {"ends": 5 * batch, "head": 2.5 * sizes.vocabulary}
    loop = both | {"ends": 4 * batch, "layer": layer}
    if pipeline.rounds == 1:
        loop |= {"tick": chunk * sizes.kept, "gradients": 2 * sizes.layers}
    else:  # the layers of a chunk run without rematerialisation of their own; a tick has the gradients of one chunk
        gradients = (1 + 1 / pipeline.rounds) * sizes.layers
        loop |= {"tick": chunk * sizes.everything, "head": 2 * sizes.vocabulary, "gradients": gradients}
    return [loss, loop]


def one_layer(sizes: Sizes) -> float:
    """The backward pass of one layer, beside what is kept of it.

    The stream is there in several places, over the whole width too where tensor parallelism gathers it, and once more for each
    expert. What comes from the host's memory is there twice: in use, and under way.
    """
    streams = 4 * sizes.whole_stream + 1.5 * sizes.stream + 3 * sizes.routed
    return streams + 3 * sizes.hidden + 0.5 * sizes.heads + sizes.gathered + 2 * sizes.offloaded
