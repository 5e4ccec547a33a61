"""Models with variables and random numbers: what moves them, and what they are the same under."""

import functools

import jax
import numpy as np
import pytest
import toy
from stateful import BatchNorm, WatchedLinear

from axlearn_core import compose, patch, replace_config
from axlearn_core.checkpoint import OrbaxCheckpointer
from axlearn_core.compose import Functional
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_transformer.norm import RMSNorm

KINDS = ("dropout", "batch-norm", "amax")
STEPS = 3


@functools.cache
def config(kind, *features):
    tree = patch(toy.small("llama2-7b"), {"model.dtype": "float32"})
    features = [*features, *(["dropout:rate=0.2"] if kind == "dropout" else [])]
    if features:
        tree = resolve(tree, with_=features).config
    if kind == "batch-norm":
        return replace_config(tree, RMSNorm, BatchNorm.Config(), drop=("eps",))
    if kind == "amax":
        down = {"model.decoder.layer.feed_forward.down": WatchedLinear.Config()}
        return patch(tree, down)
    return tree


@functools.cache
def trained(kind, *features, mode="scan", mesh=(), steps=STEPS):
    """(losses, variables, the final state, the program) of a few steps on different batches."""
    cfg = patch(
        config(kind, *features), {"mesh.shape": dict(mesh)} | ({"model.decoder.stack.mode": mode} if mode else {})
    )
    program = compose(cfg, jax.devices() if mesh else jax.devices()[:1])
    with toy.quick_to_compile():
        state = program.init(seed=0)
        losses = []
        for step in range(steps):
            state, scalars = program.train_step(state, program.put(toy.batch(step)))
            losses.append(float(scalars["loss"]))
    return losses, jax.device_get(state.variables), state, program


def same(one, other, tolerance=1e-5):
    np.testing.assert_allclose(one[0], other[0], rtol=tolerance)
    assert one[1].keys() == other[1].keys()
    for path, value in one[1].items():
        np.testing.assert_allclose(value, other[1][path], rtol=tolerance, atol=tolerance, err_msg=path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "how",
    [
        {"mode": "unrolled"},
        {"features": ("remat:save=[]",)},
        {"features": ("remat:save=[]",), "mode": "unrolled"},
        {"mesh": (("fsdp", 8),)},
        pytest.param({"mesh": (("data", 2), ("fsdp", 2), ("tensor", 2))}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_how_it_runs_changes_nothing(kind, how):
    how = dict(how)
    same(trained(kind, *how.pop("features", ()), **how), trained(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_state_moves_and_is_where_its_layer_is(kind):
    _, variables, state, program = trained(kind)
    specs = program.functional.variables
    assert variables.keys() == specs.keys() == state.variables.keys()
    assert bool(program.functional.streams) == (kind == "dropout")
    assert program.functional.batch_dependence
    fresh = program.init(seed=0).variables
    for path, value in variables.items():
        assert value.shape == specs[path].shape
        assert not np.array_equal(value, fresh[path]), path
        layers = value.shape[0] if ".layer." in path else 1
        assert layers == (2 if ".layer." in path else 1)


@pytest.mark.parametrize("kind", ["batch-norm", "amax"])
def test_evaluation_reads_variables_and_writes_none(kind):
    _, _, state, program = trained(kind)
    batch = program.put(toy.batch())
    first = program.eval_step(state, batch)
    assert float(program.eval_step(state, batch)["loss_sum"]) == float(first["loss_sum"])
    other = state.replace(variables={p: x * 0 for p, x in state.variables.items()})
    changed = float(program.eval_step(other, batch)["loss_sum"]) != float(first["loss_sum"])
    assert changed == (kind == "batch-norm")  # this history of magnitudes is only kept


@pytest.mark.parametrize("kind", KINDS)
def test_microbatches_take_variables_from_one_to_the_next(kind):
    whole, parts = trained(kind), trained(kind, "gradient-accumulation:steps=2")
    assert np.isfinite(parts[0]).all()
    assert parts[0] != whole[0]
    if kind == "amax":  # two entries a step
        path = next(iter(parts[1]))
        assert (parts[1][path] > 0).all()
        assert (whole[1][path][..., 3] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_is_the_same_on_any_number_of_stages(kind):
    one = trained(kind, "pipeline:microbatches=2", mode=None)
    same(trained(kind, "pipeline:microbatches=2", mode=None, mesh=(("pipeline", 2), ("fsdp", 4))), one)


@pytest.mark.slow
def test_an_interleaved_pipeline_too():
    feature = "pipeline:microbatches=4,schedule=interleaved,rounds=2"
    tree = patch(config("amax", feature), {"model.decoder.num_layers": 4})
    results = []
    for mesh in ({}, {"pipeline": 2, "fsdp": 4}):
        program = compose(patch(tree, {"mesh.shape": mesh}), jax.devices() if mesh else jax.devices()[:1])
        state, scalars = program.train_step(program.init(seed=0), program.put(toy.batch()))
        results.append(([float(scalars["loss"])], jax.device_get(state.variables)))
    same(*results)


@pytest.mark.parametrize("kind", ["dropout", "batch-norm"])
def test_a_restored_state_goes_on_bit_for_bit(kind, tmp_path):
    losses, variables, *_ = trained(kind, mode="unrolled")
    _, _, state, program = trained(kind, mode="unrolled", steps=2)
    checkpointer = OrbaxCheckpointer.Config().build(directory=tmp_path)
    checkpointer.save(2, state)
    checkpointer.wait()
    restored, _ = checkpointer.restore(2, program.state)
    with toy.quick_to_compile():
        again, scalars = program.train_step(restored, program.put(toy.batch(2)))
    checkpointer.close()
    assert float(scalars["loss"]) == losses[2]
    assert all(np.array_equal(again.variables[p], x) for p, x in variables.items())


def test_a_checkpoint_without_the_variables_is_refused(tmp_path):
    _, _, state, program = trained("batch-norm")
    checkpointer = OrbaxCheckpointer.Config().build(directory=tmp_path)
    checkpointer.save(3, state.replace(variables={}))
    checkpointer.wait()
    with pytest.raises(CheckpointError, match=r"missing: variables\.decoder"):
        checkpointer.restore(3, program.state)
    checkpointer.save(4, state)
    checkpointer.wait()
    with pytest.raises(CheckpointError, match=r"unexpected: variables\.decoder"):
        checkpointer.restore(4, jax.tree.map(lambda x: x, program.state).replace(variables={}))
    checkpointer.close()


def test_a_model_with_variables_is_not_bound_without_them():
    functional = Functional.of(config("batch-norm").model)
    with pytest.raises(RequestError, match=r"has variables that it was not given: decoder\..*and \d+ more"):
        functional.bind(functional.abstract)


def test_a_skipped_step_keeps_the_variables():
    _, _, state, program = trained("amax")
    broken = state.replace(params={p: x * np.nan if p == "decoder.norm.weight" else x for p, x in state.params.items()})
    kept = jax.device_get(broken.variables)
    after, scalars = program.train_step(jax.tree.map(lambda x: x.copy(), broken), program.put(toy.batch()))
    assert not np.isfinite(float(scalars["loss"]))
    assert all(np.array_equal(after.variables[p], x) for p, x in kept.items())
