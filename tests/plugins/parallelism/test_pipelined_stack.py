"""Errors of the pipelined stack, and its equivalence to a plain stack."""

import jax
import numpy as np
import pytest

from axlearn_core.compose import compose
from axlearn_core.config import patch
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.errors import ConfigError
from axlearn_core.nn.layer import Context
from axlearn_core.nn.summaries import get_scalars
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_parallelism.pipelined_stack import PipelinedStack
from support import extended_models, toy_models


def program(*features, shape=None, layers=2, rows=None):
    small = patch(toy_models.small("quickstart"), {"model.decoder.num_layers": layers})
    cfg = resolve(small, with_=features).config
    shape = shape or {"pipeline": 2, "fsdp": 4}
    return compose(
        patch(cfg, {"mesh": Mesh(shape=shape, rules=cfg.mesh.rules)}), jax.devices()[: int(np.prod([*shape.values()]))]
    )


def traced(instance, rows=16):
    specs = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in toy_models.batch(rows=rows).items()}
    return instance.lower("train", specs)


def test_an_axis_that_splits_nothing_is_refused_and_the_feature_is_named():
    with pytest.raises(
        ConfigError, match=r"mesh\.shape\.pipeline: no mesh rule.*\n.*got: 2 devices\n.*--with pipeline:"
    ):
        program()


def test_what_the_model_shares_with_its_layers_is_refused():
    """The streams of Gemma 3n would be split by stream instead of by row, and the last ones would be lost."""
    stack, x = PipelinedStack.Config(microbatches=2).build(), np.zeros((4, 8, 16), np.float32)
    context = Context()
    context.share("altup_streams", x)
    with pytest.raises(ConfigError, match=r"stack\.microbatches: a pipeline does not pass on[\s\S]*got: altup_streams"):
        stack(None, x, context)


def test_layers_that_make_no_equal_stages():
    with pytest.raises(ConfigError, match=r"dimension 0 \(layers\) is not divisible by the mesh axes pipeline"):
        program("pipeline:microbatches=2", layers=3)
    with pytest.raises(ConfigError, match=r"equal chunks\n.*got: 2 layers for 2 stages of 2 chunks"):
        traced(program("pipeline:microbatches=2,schedule=interleaved"))


def test_stages_of_different_kinds():
    with pytest.raises(ConfigError, match=r"same kinds of layers in the same order\n.*kinds 0 0 1 1 in chunks of 2"):
        traced(program("pipeline:microbatches=2", "moe:dense_layers=2", layers=4, shape={"pipeline": 2}))


def test_microbatches_that_do_not_fit():
    with pytest.raises(
        ConfigError, match=r"microbatches: does not divide the number of rows in the batch\n.*3 for 16 rows"
    ):
        traced(program("pipeline:microbatches=3"))
    with pytest.raises(ConfigError, match=r"2 rows per microbatch for 4 devices that share the batch"):
        traced(program("pipeline:microbatches=8"))
    with pytest.raises(ConfigError, match=r"a multiple of the number of stages\n.*1 microbatches for 2 stages"):
        traced(program("pipeline:microbatches=1,schedule=interleaved", layers=4))


def test_parameters_equal_a_plain_stack_and_each_stage_has_its_own():
    plain = program(shape={"fsdp": 8}).functional
    instance = program("pipeline:microbatches=2")
    assert instance.functional.abstract == plain.abstract
    stacked = [p for p, axes in instance.functional.axes.items() if "layers" in axes]
    assert stacked
    for path in stacked:
        assert instance.state.params[path].sharding.spec[0] == "pipeline", path


def loss_and_summaries(instance):
    """Return the training loss and the summaries of a batch, without gradients."""
    functions = instance.functions["train"].call.__self__

    def run(params, batch):
        with instance.tracing("train"):
            loss, (report, _) = functions.training_loss(params, {}, batch, None)
        return loss, get_scalars(report)

    params = toy_models.filled(instance.functional)
    places = {p: jax.device_put(x, instance.state.params[p].sharding) for p, x in params.items()}
    compiled = jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})
    return jax.device_get(compiled(places, instance.put(toy_models.batch(rows=4))))


@pytest.mark.slow
def test_stages_report_the_losses_of_microbatches_in_sequence():
    (loss, report), (loss_there, report_there) = (
        loss_and_summaries(program("pipeline:microbatches=2", "moe:num_experts=2,top_k=1", shape=shape))
        for shape in ({"fsdp": 1}, {"pipeline": 2})
    )
    assert report["load_balance"] > 0
    assert report_there == {name: pytest.approx(value, rel=1e-5, abs=1e-6) for name, value in report.items()}
    assert loss_there == pytest.approx(loss, rel=1e-6)


def test_other_features_reach_the_pipelined_stack():
    stack = resolve(
        "quickstart", with_=["pipeline:microbatches=4", "remat", "scan:on=false"]
    ).config.model.decoder.stack
    assert isinstance(stack, PipelinedStack.Config)
    assert stack.remat is not None
    assert stack.mode == "unrolled"


def with_model(change, *features, shape):
    """Compose the small quickstart with a changed model."""
    small = toy_models.small("quickstart")
    cfg = resolve(patch(small, {"model": change(small.model)}), with_=features).config
    return compose(
        patch(cfg, {"mesh": Mesh(shape=shape, rules=cfg.mesh.rules)}), jax.devices()[: int(np.prod([*shape.values()]))]
    )


@pytest.mark.slow
@pytest.mark.parametrize("features", [["pipeline:microbatches=2"], ["pipeline:microbatches=2,schedule=interleaved"]])
def test_each_stage_gets_the_inputs_of_its_layers(features):
    def change(model):
        return patch(extended_models.per_layer(model), {"decoder.num_layers": 4})

    losses = [
        loss_and_summaries(with_model(change, *features, shape=shape))[0] for shape in ({"fsdp": 1}, {"pipeline": 2})
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_what_stages_cannot_pass_on_is_refused():
    instance = with_model(extended_models.per_layer, "pipeline:microbatches=2,schedule=1f1b", shape={"pipeline": 2})
    with pytest.raises(ConfigError, match=r"1f1b does not differentiate inputs of layers\n.*got: per_layer"):
        traced(instance)

    def share(model):
        return patch(model, {"decoder.layer.attention.kv_name": "kv"})

    instance = with_model(share, "pipeline:microbatches=2", shape={"pipeline": 2})
    with pytest.raises(ConfigError, match=r"layers of different stages cannot share values\n.*got: kv"):
        traced(instance)
