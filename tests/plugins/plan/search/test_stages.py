"""The memory of a step on pipeline stages: terms computed by hand, and sums against compiled programs."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_parallelism.schedule import OneForwardOneBackward, Schedule
from axlearn_plugins_plan.search import rank
from axlearn_plugins_plan.search.compile_layouts import plan_words, read_plan, run_plan
from axlearn_plugins_plan.search.mesh_figures import MeshFigures
from axlearn_plugins_plan.search.pipelines import Pipeline, with_pipeline
from axlearn_plugins_plan.search.sizes import Sizes
from axlearn_plugins_plan.search.space import Choice, MeshChoice
from axlearn_plugins_plan.search.stages import peak_terms, residual_bytes
from axlearn_plugins_plan.search.trace import repeated_outputs
from support.needs import require

PLENTY = 1e12


def sizes(**changes):
    base = {
        "stream": 8.0, "whole_stream": 16.0, "kept": 20.0, "saved_without_remat": 100.0, "layer": 50.0, "layers": 1000.0,
        "shapes": 600.0, "largest": 300.0, "sharded": True,
        "rest": 40.0, "gathered": 30.0, "vocabulary": 20.0, "tensor": False,
    }  # fmt: skip
    return Sizes(**{**base, **changes})


def gpipe(microbatches=8, stages=4):
    return Pipeline(stages=stages, microbatches=microbatches)


def interleaved(microbatches=8, stages=4, rounds=2):
    return Pipeline(stages=stages, microbatches=microbatches, schedule="interleaved", rounds=rounds)


def one_forward_one_backward(microbatches=8, stages=4):
    return Pipeline(stages=stages, microbatches=microbatches, schedule="1f1b")


def test_gpipe_keeps_all_layers_of_every_tick():
    assert residual_bytes(gpipe(), sizes(), 5) == Schedule(4, 8).ticks * 5 * 20


def test_an_interleaved_chunk_keeps_its_input_and_saved_activations():
    assert residual_bytes(interleaved(), sizes(), 5) == Schedule(4, 8, 2).ticks * (8 + 5 * (20 - 8))


@pytest.mark.parametrize("microbatches", [8, 128])
def test_1f1b_keeps_inputs_in_its_slots_and_the_layers_of_one_microbatch(microbatches):
    slots = OneForwardOneBackward(4, microbatches).slots + 1
    assert residual_bytes(one_forward_one_backward(microbatches), sizes(), 5) == slots * 8 + 5 * 20


def test_the_1f1b_peak_is_between_ticks_or_within_a_large_layer():
    between = peak_terms(one_forward_one_backward(), sizes(), 5, PLENTY)
    assert between["gradients"] == 3 * 1000 + 2 * 600 + 40
    assert between["sent"] == 2 * 8
    inside = peak_terms(one_forward_one_backward(), sizes(layer=5000.0), 5, PLENTY)
    assert inside["layer"] == 0.6 * 5000 + 8 + 2 * 30
    assert inside["gradients"] == 2 * 1000 + 2 * 600 + 40


def test_gpipe_in_a_layer_with_room_and_without():
    with_room, without = (peak_terms(gpipe(), sizes(layer=9000.0), 5, room) for room in (PLENTY, 0.0))
    assert with_room["gradients"] == 3 * 1000
    assert without["gradients"] == 2 * 1000
    assert with_room["ends"] == 2 * 8 * 8, "gradients of all microbatches' inputs and outputs"
    assert with_room["tick"] == 5 * 20, "sliced from the saved activations of all ticks"


def test_between_two_ticks_the_gradients_of_all_outputs_are_copied():
    between = peak_terms(gpipe(), sizes(stream=500.0, whole_stream=0.0, layer=0.0), 5, 0.0)
    assert "layer" not in between
    assert between["ends"] == 3 * 8 * 500
    assert between["gradients"] == 2 * 1000


def test_with_room_the_next_tick_begins_before_the_gradients_are_added():
    many, two = (peak_terms(gpipe(), sizes(layer=0.0, gathered=0.0), n, PLENTY)["gradients"] for n in (5, 2))
    assert many == 3 * 1000 + 2 * 300, "a new sum, and the largest parameter's weights in another layout"
    assert two == 3 * 1000, "two layers are not a loop: the peak is in a layer"
    between = peak_terms(
        interleaved(), sizes(stream=900.0, kept=1000.0, saved_without_remat=5000.0, gathered=0.0), 5, PLENTY
    )
    assert (between["ends"], between["tick"], between["gradients"]) == (3 * 8 * 900, 5 * 5000, 1000)


def test_an_interleaved_chunk_counts_activations_and_weight_copies():
    many = peak_terms(interleaved(), sizes(saved_without_remat=5000.0), 5, PLENTY)
    assert many["tick"] == 5 * 5000
    assert many["copies"] == 1000
    assert many["gradients"] == 1000 * (1 + 0.25 + 0.5), (
        "the sums, and one of two chunks' bfloat16 weights and gradients"
    )
    one = peak_terms(interleaved(), sizes(saved_without_remat=5000.0), 1, PLENTY)
    assert one["gradients"] == 1000 * (1 + 0.25)


def test_tensor_parallelism_keeps_whole_streams_around_a_layer():
    split, whole = (peak_terms(gpipe(), sizes(layer=9000.0, tensor=t), 5, PLENTY)["layer"] for t in (True, False))
    assert split - whole == 6 * 16


def test_the_embedding_of_the_batch_is_a_peak_too():
    assert "embedding" in peak_terms(gpipe(), sizes(whole_stream=1000.0), 1, PLENTY)
    assert "embedding" not in peak_terms(one_forward_one_backward(), sizes(whole_stream=1000.0), 1, PLENTY)
    in_columns = peak_terms(gpipe(), sizes(whole_stream=1000.0, sharded=False), 1, PLENTY)
    assert "embedding" not in in_columns, "without FSDP, each device has the table columns of its stream"


def test_an_interleaved_loss_holds_another_copy_of_a_split_stream():
    large = {"stream": 10_000.0, "saved_without_remat": 0.0, "kept": 10_000.0, "sharded": False}
    split, whole = (peak_terms(interleaved(), sizes(whole_stream=x, **large), 1, 0.0) for x in (20_000.0, 10_000.0))
    assert (split["ends"], whole["ends"]) == (4 * 8 * 10_000, 3 * 8 * 10_000)


def test_what_has_the_numbers_of_another_is_repeated():
    def step(x, _):
        y = jnp.sin(x)
        return x + 1, (y, jnp.cos(x), checkpoint_name(y, "tagged"))

    jaxpr = jax.make_jaxpr(lambda x: jax.lax.scan(step, x, None, length=2))(jnp.ones(3))
    (scan,) = jaxpr.eqns
    body = scan.params["jaxpr"].jaxpr
    assert repeated_outputs(body.outvars[1:], body.eqns) == {body.outvars[3]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "shape", "remat"),
    [
        (gpipe(16, 2), {"pipeline": 2, "data": 64, "tensor": 2}, "remat:save=[mlp_gate,mlp_up]"),
        (one_forward_one_backward(64, 32), {"pipeline": 32, "data": 8}, "remat:save=[attention_out]"),
        (interleaved(16, 2), {"pipeline": 2, "data": 8, "fsdp": 4, "tensor": 4}, "remat:save=[mlp_gate,mlp_up]"),
        (interleaved(64, 16), {"pipeline": 16, "data": 2, "tensor": 8, "stream": ("tensor",)}, "remat:policy=full"),
        (gpipe(64, 16), {"pipeline": 16, "data": 4, "tensor": 4, "stream": ("tensor",)}, "remat:policy=full"),
    ],
)
def test_the_estimate_is_within_a_twentieth_of_the_compiled_program(pipeline, shape, remat):
    require("jax_plugins.xla_cuda12")
    request = Request.from_arguments("llama2-7b", target="h100-8x32")
    space = rank.Space(request, ())
    stream = {"activation_embed": shape["stream"]} if "stream" in shape else {}
    mesh = MeshChoice(shape={axis: size for axis, size in shape.items() if axis != "stream"}, stream=stream)
    config = resolve(with_pipeline(request, pipeline)).config
    figures = MeshFigures(space.program, config, space.machine, mesh)
    row = space.estimate_choice(Choice(mesh=mesh, remat=remat, pipeline=pipeline), figures)
    plan, error = run_plan(plan_words(request, row), 300)
    assert plan is not None, error
    assert row.estimate.total == pytest.approx(read_plan(plan, row.machine, row.estimate.host, False).bytes, rel=0.05)
