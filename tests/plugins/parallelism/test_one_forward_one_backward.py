"""1F1B gives the same loss and gradients as other schedules, with memory independent of the microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.compose import ModelWeights, compose
from axlearn_core.config import patch
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.errors import ConfigError
from axlearn_core.learn import Learner
from axlearn_core.nn.summaries import get_scalars
from axlearn_core.plugins.resolve import resolve
from axlearn_core.train.step import TrainingFunctions
from axlearn_plugins_parallelism.loss_parts import LossParts, prune
from axlearn_plugins_parallelism.one_forward_one_backward import interleave_gradients
from axlearn_plugins_parallelism.placed_learner import PlacedLearner
from axlearn_plugins_parallelism.schedule import OneForwardOneBackward
from support import toy_models

QUICK = {"xla_backend_optimization_level": 0}


def program(*features, shape, layers=4, experiment="quickstart", **sizes):
    small = patch(toy_models.small(experiment), {"model.decoder.num_layers": layers, **sizes})
    cfg = resolve(small, with_=features).config
    mesh = Mesh(shape=shape, rules=cfg.mesh.rules)
    return compose(patch(cfg, {"mesh": mesh}), jax.devices()[: int(np.prod([*shape.values()]))]), cfg


def gradients(*features, shape, batch=None, key=None, **options):
    """Return (loss, summaries, gradients, variables) from the learner of the config."""
    trainer_program, cfg = program(*features, shape=shape, **options)
    learner = cfg.learner.build(max_steps=1, axes=trainer_program.trained.axes)
    functions = TrainingFunctions(trainer_program.functional, learner, trainer_program.trained)
    specs = trainer_program.trained.variables
    variables = {p: jnp.zeros(s.shape, s.dtype) for p, s in specs.items()}

    def run(params, variables, batch, key):
        with trainer_program.tracing("train"):
            return learner.value_and_grad(
                functions.training_loss, params, trainer_program.trained.begin_step(variables), batch, key
            )

    params = toy_models.filled(trainer_program.functional)
    places = {p: jax.device_put(x, trainer_program.state.params[p].sharding) for p, x in params.items()}
    batch = toy_models.batch() if batch is None else batch
    (loss, summaries, variables), grads = jax.jit(run, compiler_options=QUICK)(
        places, variables, trainer_program.put(batch), key
    )
    return jax.device_get((loss, get_scalars(summaries), grads, variables))


def apart(one, other):
    return {p: np.linalg.norm(other[p] - g) / (np.linalg.norm(g) + 1e-12) for p, g in one.items()}


def agree(one, other):
    (loss, summaries, grads, variables), (loss_there, summaries_there, grads_there, variables_there) = one, other
    assert loss_there == pytest.approx(loss, rel=2e-6)
    assert summaries_there.keys() == summaries.keys()
    for name, value in summaries.items():
        assert summaries_there[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    worst = apart(grads, grads_there)
    assert max(worst.values()) < 2e-6, worst
    for path, value in variables.items():
        np.testing.assert_allclose(variables_there[path], value, rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize(
    ("features", "shape"),
    [
        ((), {"pipeline": 4, "fsdp": 2}),
        pytest.param(("remat",), {"pipeline": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param(("gradient-accumulation:steps=2",), {"pipeline": 2}, marks=pytest.mark.slow),
    ],
    ids=["stages", "remat", "accumulation"],
)
def test_it_computes_what_gpipe_computes(features, shape):
    both = [gradients(f"pipeline:microbatches=4,schedule={name}", *features, shape=shape) for name in ("gpipe", "1f1b")]
    agree(*both)


@pytest.mark.slow
@pytest.mark.parametrize("router", ["softmax-router", "sigmoid-router"])
def test_losses_and_layer_variables_equal_those_of_gpipe(router):
    """Auxiliary losses have equal weight in each microbatch, and biases see all microbatches."""
    batch = toy_models.batch()
    batch["weights"][1::4, 5:] = 0
    features = (f"moe:num_experts=4,top_k=2,router={{type: {router}}}",)
    gpipe, ours = (
        gradients(f"pipeline:microbatches=4,schedule={name}", *features, shape={"pipeline": 2}, batch=batch)
        for name in ("gpipe", "1f1b")
    )
    reported = "load_balance" in gpipe[1]
    assert reported or gpipe[3], "layers report and write nothing, so the test compares nothing"
    agree(gpipe, ours)


@pytest.mark.slow
def test_layers_draw_the_numbers_that_they_draw_without_it():
    features = ("dropout:rate=0.3,embedding=false", "pipeline:microbatches=4,schedule=")
    settings = {
        "shape": {"pipeline": 2},
        "key": jax.random.key(3),
    }
    gpipe, ours = (gradients(features[0], features[1] + name, **settings) for name in ("gpipe", "1f1b"))
    agree(gpipe, ours)
    plain = gradients(features[1] + "1f1b", **settings)
    assert abs(plain[0] - ours[0]) > 1e-4, "no tokens were dropped"


def test_microbatches_draw_numbers_of_their_own_before_the_stack():
    trainer_program, cfg = program(
        "dropout:rate=0.5", "pipeline:microbatches=2,schedule=1f1b", shape={"fsdp": 1}, layers=2
    )
    learner = cfg.learner.build(max_steps=1, axes=trainer_program.trained.axes)
    functions = TrainingFunctions(trainer_program.functional, learner, trainer_program.trained)
    params = toy_models.filled(trainer_program.functional)
    batch = {name: np.repeat(x[:1], 2, axis=0) for name, x in toy_models.batch().items()}

    @jax.jit
    def activations(params, batch, key):
        with trainer_program.tracing("train"):
            parts = LossParts.from_loss(functions.training_loss, params, {}, batch, key)
            return [parts.trace(parts.leaves, index)[0].x for index in (0, 1)]

    one, two = map(np.asarray, activations(params, batch, jax.random.key(3)))
    assert np.count_nonzero(one == 0) > 0, "no activations were dropped"
    assert not np.array_equal(one == 0, two == 0)


def temporaries(schedule, microbatches):
    sizes = {"model.decoder.hidden_dim": 64, "model.decoder.layer.feed_forward.hidden_dim": 256}
    feature = f"pipeline:microbatches={microbatches},schedule={schedule}"
    trainer_program, _ = program(feature, shape={"pipeline": 8}, layers=8, **sizes)
    shapes = {"tokens": "int32", "targets": "int32", "weights": "float32"}
    specs = {name: jax.ShapeDtypeStruct((microbatches, 128), dtype) for name, dtype in shapes.items()}
    return trainer_program.compile("train", specs).memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_temporaries_do_not_grow_with_the_microbatches():
    few, many = (temporaries("1f1b", n) for n in (8, 32))
    assert many <= 1.2 * few
    assert temporaries("gpipe", 32) > 4 * many, "the comparison is trivial"


@pytest.mark.parametrize(
    "plan", [OneForwardOneBackward(2, 1), OneForwardOneBackward(4, 9), OneForwardOneBackward(3, 3)]
)
def test_every_stage_runs_one_forward_and_one_backward_with_its_residuals(plan):
    fill, steady, drain = plan.phases
    assert (len(fill), len(steady), len(drain)) == (plan.stages - 1, plan.microbatches, plan.stages - 1)
    for stage in range(plan.stages):
        slots, finished = {}, []
        for tick in (*fill, *steady, *drain):
            work = plan.forward(tick, stage)
            assert not work.valid or tick not in drain
            if work.valid:
                index = int(work.microbatch)
                assert slots.get(index % plan.slots) is None, "overwritten"
                slots[index % plan.slots] = index
            work = plan.backward(tick, stage)
            assert not work.valid or tick not in fill
            if work.valid:
                index = int(work.microbatch)
                assert slots[index % plan.slots] == index
                slots[index % plan.slots] = None
                finished.append(index)
        assert finished == list(range(plan.microbatches))


@pytest.mark.parametrize("tick", range(12))
def test_what_a_stage_sends_is_wanted_a_tick_later(tick):
    plan = OneForwardOneBackward(4, 5)
    for stage in range(3):
        sent, needed = plan.forward(tick, stage), plan.forward(tick + 1, stage + 1)
        assert (bool(sent.valid), int(sent.microbatch)) == (bool(needed.valid), int(needed.microbatch))
        sent, needed = plan.backward(tick, stage + 1), plan.backward(tick + 1, stage)
        assert (bool(sent.valid), int(sent.microbatch)) == (bool(needed.valid), int(needed.microbatch))


def test_the_feature_sets_stack_and_learner_and_takes_them_back():
    cfg = resolve("quickstart", with_=["pipeline:microbatches=4,schedule=1f1b", "offload-optimizer"]).config
    assert cfg.model.decoder.stack.schedule == "1f1b"
    assert cfg.learner.pipelined
    assert cfg.learner.offload
    back = resolve(cfg, with_=["pipeline:microbatches=4"]).config
    assert not back.learner.pipelined
    assert type(resolve("quickstart", with_=["pipeline:microbatches=4"]).config.learner) is Learner.Config


def test_an_operation_that_nobody_needs_is_left_out():
    def function(leaves, x):
        return leaves[0] * x + 0 * jnp.sum(leaves[2].shape[0]), None

    pruned = prune(lambda leaves, x: (function(leaves, x)[0], jnp.sin(leaves[1]))[0], [1.0, 2.0, jnp.ones(3)], 3.0)
    assert pruned.reads == [0]
    assert "sin" not in str(jax.make_jaxpr(pruned.call)([1.0, 2.0, jnp.ones(3)], 3.0))


class Twice(PlacedLearner):
    """Differentiate a loss that runs the model twice."""

    def value_and_grad(self, loss, params, variables, batch, key=None):
        def twice(*args):
            value, aux = loss(*args)
            return value + loss(*args)[0], aux

        return Learner.value_and_grad(self, interleave_gradients(twice), params, variables, batch, key)


def lowered(cfg, shape, rows=16):
    trainer_program = compose(
        patch(cfg, {"mesh": Mesh(shape=shape, rules=cfg.mesh.rules)}), jax.devices()[: shape["pipeline"]]
    )
    specs = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in toy_models.batch(rows=rows).items()}
    return trainer_program.lower("train", specs)


def test_a_loss_that_cannot_be_cut_is_refused():
    small = patch(toy_models.small("quickstart"), {"model.decoder.num_layers": 2})
    cfg = resolve(small, with_=["pipeline:microbatches=4,schedule=1f1b"]).config
    gpipe = patch(cfg, {"model.decoder.stack.schedule": "gpipe"})
    with pytest.raises(ConfigError, match=r"one pipelined stack with `schedule: 1f1b` exactly once\n.*got: no run"):
        lowered(gpipe, {"pipeline": 2})
    with pytest.raises(ConfigError, match=r"does not divide the number of rows in the batch\n.*4 for 6 rows"):
        lowered(cfg, {"pipeline": 2}, rows=6)
    trainer_program = compose(
        patch(cfg, {"mesh": Mesh(shape={"pipeline": 2}, rules=cfg.mesh.rules)}), jax.devices()[:2]
    )
    learner = Twice(Twice.Config(pipelined=True), max_steps=1)
    loss = TrainingFunctions(trainer_program.functional, learner, trainer_program.trained).training_loss
    with trainer_program.tracing("train"), pytest.raises(ConfigError, match=r"got: 2 runs of a stack"):
        jax.eval_shape(
            lambda p, b: learner.value_and_grad(loss, p, {}, b), trainer_program.functional.abstract, toy_models.batch()
        )


@pytest.mark.slow
def test_what_computes_no_gradients_goes_through_the_stages_as_before():
    trainer_program, _ = program("pipeline:microbatches=4,schedule=1f1b", shape={"pipeline": 2})
    params = {
        p: jax.device_put(x, trainer_program.state.params[p].sharding)
        for p, x in toy_models.filled(trainer_program.functional).items()
    }
    with trainer_program.tracing("loss"):
        call = jax.jit(
            lambda p, b: trainer_program.function("loss").call(ModelWeights(p, {}), b)[0], compiler_options=QUICK
        )
        loss = call(params, trainer_program.put(toy_models.batch()))
    trained = gradients("pipeline:microbatches=4,schedule=1f1b", shape={"pipeline": 2})[0]
    assert float(loss) == pytest.approx(float(trained), rel=2e-6)
