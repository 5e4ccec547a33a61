"""Pipelines in the layout search: proposed schedules, and their formulas against compiled programs."""

import jax
import pytest

from axlearn_core.compose import compose
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_parallelism.schedule import OneForwardOneBackward, Schedule
from axlearn_plugins_plan.flops import works
from axlearn_plugins_plan.memory import shard_bytes
from axlearn_plugins_plan.search import rank
from axlearn_plugins_plan.search.compile_layouts import resolved_request
from axlearn_plugins_plan.search.pipelines import Pipeline, pipelines, schedules

REMATS = ["remat:policy=full", "remat:save=[query,key,value]"]
ROWS = 64


@pytest.fixture(scope="module")
def space():
    sets = {"model.decoder.num_layers": 4, "input.batch_size": ROWS}
    return rank.Space(Request.from_arguments("quickstart", set=sets, target="h100-8x1"), ())


@pytest.fixture(scope="module")
def ranked(space):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank, "remat_options", lambda *_: REMATS)
        return space.rank_layouts()


@pytest.fixture(scope="module")
def staged(ranked):
    return [r for r in ranked if r.choice.pipeline is not None]


@pytest.mark.slow
def test_every_schedule_is_proposed(staged):
    assert {(r.choice.pipeline.schedule, r.choice.pipeline.stages) for r in staged} == {
        ("gpipe", 2), ("gpipe", 4), ("1f1b", 2), ("1f1b", 4), ("interleaved", 2),
    }  # fmt: skip
    assert all(not r.choice.offload_optimizer and r.choice.microbatches is None for r in staged)


@pytest.mark.slow
def test_every_one_is_legal_and_resolves(space, staged):
    for row in staged[:: max(1, len(staged) // 12)]:
        pipeline = row.choice.pipeline
        config = resolve(resolved_request(space.request, row)).check().config
        sizes = config.mesh.sizes(8)
        assert sizes["pipeline"] == pipeline.stages
        assert config.model.decoder.stack.schedule == pipeline.schedule
        assert config.model.decoder.stack.microbatches == pipeline.microbatches
        assert ROWS % (pipeline.microbatches * sizes["data"] * sizes["fsdp"]) == 0


def test_layers_and_rows_that_do_not_divide_are_not_proposed():
    shape = {"pipeline": 4, "fsdp": 2}
    assert list(pipelines(shape, 64, 2, {6}, ("gpipe", "1f1b"))) == []
    assert list(pipelines(shape, 64, 2, {4}, ("interleaved",))) == [], "a stage with one layer cannot have two chunks"
    assert [p.microbatches for p in pipelines(shape, 64, 2, {8}, ("gpipe",))] == [8, 16, 32]
    assert next(pipelines({"pipeline": 3}, 12, 1, {6}, ("interleaved",))).microbatches == 6
    assert list(pipelines({"fsdp": 8}, 64, 8, {8}, ("gpipe",))) == []


def test_a_request_whose_learner_is_another_has_no_1f1b():
    request = Request.from_arguments("quickstart", with_=["schedule-free"], target="h100-8x1")
    assert set(schedules(request)) <= {"gpipe", "interleaved", "1f1b"}
    assert schedules(Request.from_arguments("quickstart", target="h100-8x1")) == ("gpipe", "interleaved", "1f1b")


@pytest.mark.parametrize(("schedule", "rounds"), [("gpipe", 1), ("interleaved", 2), ("1f1b", 1)])
def test_the_idle_time_is_that_of_the_schedule(schedule, rounds):
    pipeline = Pipeline(stages=4, microbatches=8, schedule=schedule, rounds=rounds)
    if schedule == "1f1b":
        fill, both, drain = OneForwardOneBackward(4, 8).phases
        assert 2 * pipeline.ticks == len(fill) + 2 * len(both) + len(drain)
    else:
        plan = Schedule(4, 8, rounds)
        assert pipeline.ticks == plan.ticks
        assert 1 - 1 / pipeline.stretch == pytest.approx(plan.bubble)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "1f1b"])
def test_the_formulas_count_the_work_and_the_state_of_the_program(space, staged, schedule):
    row = next(r for r in staged if r.choice.pipeline.schedule == schedule and r.choice.pipeline.stages == 2)
    program = compose(
        resolve(resolved_request(space.request, row)).config, jax.devices("cpu")[:8], machine=space.machine
    )
    bucket = program.function("train").get_bucket(space.batch)
    flops = sum(w.flops * (w.visible if w.kernel else 1.0) for w in works(program.trace("train", bucket).jaxpr.jaxpr))
    target = space.machine.target
    estimated = row.estimate.roofline.compute * 8 * target.peak_flops["float32"]
    assert estimated == pytest.approx(flops, rel=0.1)
    assert row.estimate.arguments == pytest.approx(shard_bytes(program.arguments("train", bucket)), rel=1e-3)


@pytest.mark.slow
def test_only_what_waits_in_1f1b_does_not_grow_with_the_microbatches(staged):
    def residual_bytes(schedule, microbatches):
        pipeline = Pipeline(stages=2, microbatches=microbatches, schedule=schedule)
        rows = [
            r
            for r in staged
            if r.choice.pipeline == pipeline
            and r.choice.mesh.shape == {"pipeline": 2, "fsdp": 4}
            and r.choice.remat is None
        ]
        return rows[0].estimate.kept

    assert residual_bytes("1f1b", 16) < residual_bytes("1f1b", 4) < residual_bytes("gpipe", 4)
    assert residual_bytes("gpipe", 16) > 0.7 * residual_bytes("gpipe", 4)
