"""The memory of a step on TPUs: phases computed by hand, and peaks against libtpu's buffer assignments."""

import attrs
import pytest

from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_plan.search import rank
from axlearn_plugins_plan.search.compile_layouts import plan_words, read_plan, run_plan
from axlearn_plugins_plan.search.mesh_figures import MeshFigures
from axlearn_plugins_plan.search.pipelines import Pipeline, with_pipeline
from axlearn_plugins_plan.search.sizes import Sizes, compute_sizes
from axlearn_plugins_plan.search.space import Choice, MeshChoice
from axlearn_plugins_plan.search.tpus import layer_backward_bytes, pipeline_peak, single_stage_peak
from support.needs import require

SIZES = Sizes(
    stream=8.0, whole_stream=16.0, kept=20.0, saved_without_remat=100.0, layer=50.0, hidden=12.0, heads=6.0, offloaded=3.0,
    layers=1000.0, rounded=500.0, shapes=600.0, largest=300.0, alike=600.0, sharded=True, rest=200.0, gathered=30.0,
    vocabulary=70.0, tensor=True,
)  # fmt: skip
LAYER = 4 * 16 + 1.5 * 8 + 3 * 12 + 0.5 * 6 + 30 + 2 * 3


def test_a_layer_has_streams_products_and_weights():
    assert layer_backward_bytes(SIZES) == LAYER
    assert layer_backward_bytes(attrs.evolve(SIZES, routed=32.0)) == LAYER + 3 * 32, (
        "rows of the stream for each expert"
    )


def test_in_a_layer_s_backward_pass():
    assert single_stage_peak(SIZES, 32, False, 0.0) == {
        "kept": 32 * 20, "accumulated": 0.0, "gradients": 1000, "rounded": 500, "layer": LAYER
    }  # fmt: skip
    assert single_stage_peak(SIZES, 32, True, 0.0)["accumulated"] == 1200, "gradients of all parameters are summed"


def test_in_the_loss_of_a_large_vocabulary():
    large = attrs.evolve(SIZES, head=500.0, logits=700.0)
    assert single_stage_peak(large, 32, False, 0.0) == {
        "kept": 32 * 20, "accumulated": 0.0, "rounded": 500, "ends": 8, "head": 3 * 500, "logits": 700
    }  # fmt: skip


def test_an_offloaded_optimizer_overlaps_the_backward_pass_or_is_the_peak():
    two_moments = 2 * 1200.0
    backward = single_stage_peak(SIZES, 500, True, two_moments)
    assert backward["kept"] == 500 * 20
    assert backward["optimizer"] == 2 * 300, "both moments of the largest parameter"
    update = single_stage_peak(SIZES, 32, True, two_moments)
    assert update == {"gradients": 1200, "optimizer": 2 * two_moments * 0.5 + 1.5 * two_moments * 0.5}
    half = single_stage_peak(SIZES, 0, True, two_moments / 2)
    assert half["optimizer"] == update["optimizer"] / 2, "moments in half precision need half as much"


def test_1f1b_has_two_gradients_and_a_loss_in_each_tick():
    columns = pipeline_peak(Pipeline(stages=4, microbatches=8, schedule="1f1b"), SIZES, 5, 164.0)
    assert columns == {
        "kept": 164,
        "rounded": 500,
        "layer": LAYER + 8 + 2 * 16,
        "head": 70,
        "gradients": 2 * 1000 + 200,
    }


def test_gpipe_keeps_the_ends_of_the_batch():
    pipeline = Pipeline(stages=4, microbatches=8)
    columns = pipeline_peak(pipeline, SIZES, 5, 1100.0)
    assert columns == {
        "kept": 1100, "rounded": 500, "ends": 4 * 8 * 8, "layer": LAYER, "tick": 5 * 20, "gradients": 2000
    }  # fmt: skip
    in_loss = pipeline_peak(pipeline, attrs.evolve(SIZES, layers=0.0, stream=5000.0), 5, 1100.0)
    assert in_loss == {"kept": 1100, "rounded": 500, "ends": 5 * 8 * 5000, "head": 2.5 * 70}


def test_an_offloaded_optimizer_updates_on_stages_too():
    update = pipeline_peak(Pipeline(stages=4, microbatches=8), SIZES, 5, 0.0, 9600.0)
    assert update == {"gradients": 1200, "optimizer": 9600 * 1.75}


def test_an_interleaved_chunk_computes_without_rematerialisation():
    columns = pipeline_peak(Pipeline(stages=4, microbatches=8, schedule="interleaved", rounds=2), SIZES, 5, 1100.0)
    assert columns["tick"] == 5 * 100
    assert columns["gradients"] == 1500, "the sums, and the gradients of one of two chunks"
    assert columns["head"] == 2 * 70


@pytest.mark.slow
def test_logits_are_tokens_times_vocabulary():
    space = rank.Space(Request.from_arguments("llama2-7b", target="tpu-v5p-8"), ())
    mesh = MeshChoice(shape={"fsdp": 2, "tensor": 2})
    figures = MeshFigures(space.program, space.base, space.machine, mesh)
    sizes = compute_sizes(figures, space.trace_remat(None), space.full_trace, 4)
    assert sizes.head == 4096 * 32000 / 2 * 2, "in bfloat16, over two devices"
    assert sizes.logits == pytest.approx(1024 * 4096 / 2 / 4 * 32000 / 2 * 2)


@pytest.mark.slow
def test_experts_have_their_own_rows():
    require("axlearn_plugins_moe")
    settings = {"model.decoder.num_layers": 2, "input.batch_size": 64}
    space = rank.Space(Request.from_arguments("mixtral-8x7b", target="tpu-v5p-64", set=settings), ())
    trace = space.trace_remat(None)
    rows = 64 * 8192 * 2
    assert [a.shape for a in trace.routed_stream] == [(rows, 4096)]
    assert [a.shape for a in trace.hidden] == [(rows, 14336)]
    assert trace.has_grouped_matmuls
    half = trace.scale(0.5)
    assert half.hidden[0].shape == (rows // 2, 14336)


def test_what_waits_in_the_host_s_memory_is_not_the_stream():
    space = rank.Space(Request.from_arguments("llama2-7b", target="tpu-v5p-8"), ())
    (stream,) = space.trace_remat("remat:offload=[attention_out]").stream
    assert not stream.offloaded


def test_images_have_a_stream_of_patches():
    space = rank.Space(Request.from_arguments("vit-b16", target="tpu-v5p-8", set={"input.batch_size": 64}), ())
    (stream,) = space.trace_remat(None).stream
    assert stream.shape == (64, 197, 768)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "choice"),
    [
        (
            {"data": 16, "fsdp": 8, "tensor": 2, "stream": ("tensor",)},
            {"remat": "remat:policy=full", "microbatches": 2},
        ),
        (
            {"data": 32, "fsdp": 8},
            {"remat": "remat:save=[attention_out]", "microbatches": 2, "offload_optimizer": True},
        ),
        ({"pipeline": 4, "data": 8, "fsdp": 4, "tensor": 2}, {"pipeline": Pipeline(stages=4, microbatches=8)}),
        (
            {"pipeline": 2, "data": 32, "tensor": 4},
            {"pipeline": Pipeline(stages=2, microbatches=8, schedule="1f1b"), "remat": "remat:save=[query,key,value]"},
        ),
        (
            {"pipeline": 4, "data": 64},
            {"pipeline": Pipeline(stages=4, microbatches=16, schedule="interleaved", rounds=2)},
        ),
    ],
)
def test_the_estimate_is_within_a_twentieth_of_what_libtpu_lays_out(shape, choice):
    require("libtpu")
    request = Request.from_arguments("llama2-7b", target="tpu-v5p-512")
    space = rank.Space(request, ())
    stream = {"activation_embed": shape["stream"]} if "stream" in shape else {}
    mesh = MeshChoice(shape={axis: size for axis, size in shape.items() if axis != "stream"}, stream=stream)
    pipeline = choice.get("pipeline")
    config = space.base if pipeline is None else resolve(with_pipeline(request, pipeline)).config
    row = space.estimate_choice(Choice(mesh=mesh, **choice), MeshFigures(space.program, config, space.machine, mesh))
    plan, error = run_plan(plan_words(request, row), 300)
    assert plan is not None, error
    assert row.estimate.total == pytest.approx(read_plan(plan, row.machine, row.estimate.host, False).bytes, rel=0.05)
