"""Models with variables and random numbers: what moves them, and what they are the same under. See `state_table`, too."""

import jax
import numpy as np
import pytest

from axlearn_core import compose, patch
from axlearn_core.checkpoint import ShardedCheckpointer
from axlearn_core.compose import Functional
from axlearn_core.errors import CheckpointError, RequestError
from support import toy_models
from support.stateful_models import config, same, trained

KINDS = ("dropout", "batch-norm", "amax")


UNROLLED, SHARDED = {"features": ("remat:save=[]",), "mode": "unrolled"}, {"mesh": (("fsdp", 8),)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("dropout", SHARDED),
        ("batch-norm", UNROLLED),
        pytest.param("dropout", UNROLLED, marks=pytest.mark.slow),
        pytest.param("batch-norm", SHARDED, marks=pytest.mark.slow),
        pytest.param("amax", UNROLLED, marks=pytest.mark.slow),
        pytest.param("amax", SHARDED, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_how_it_runs_changes_nothing(kind, how):
    how = dict(how)
    same(trained(kind, *how.pop("features", ()), **how), trained(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "router-bias"])
def test_state_moves_and_is_where_its_layer_is(kind):
    _, variables, state, program = trained(kind)
    specs = program.functional.variables
    assert variables.keys() == specs.keys() == state.variables.keys()
    assert bool(program.functional.streams) == (kind == "dropout")
    assert bool(program.functional.batch_dependence) == (kind != "router-bias")  # which moves once per step
    fresh = program.init(seed=0).variables
    for path, value in variables.items():
        assert value.shape == specs[path].shape
        assert not np.array_equal(value, fresh[path]), path
        layers = value.shape[0] if ".layer." in path else 1
        assert layers == (2 if ".layer." in path else 1)


@pytest.mark.fast_cases("batch-norm")
@pytest.mark.parametrize("kind", ["batch-norm", "amax", "router-bias"])
def test_evaluation_reads_variables_and_writes_none(kind):
    _, _, state, program = trained(kind)
    batch = program.put(toy_models.batch())
    first = program.eval_step(state, batch)
    assert float(program.eval_step(state, batch)["loss_sum"]) == float(first["loss_sum"])
    other = state.replace(variables={p: x * 0 for p, x in state.variables.items()})
    assert float(program.eval_step(other, batch)["loss_sum"]) != float(first["loss_sum"])


@pytest.mark.fast_cases("batch-norm")
@pytest.mark.parametrize("kind", KINDS)
def test_microbatches_take_variables_from_one_to_the_next(kind):
    whole, parts = trained(kind), trained(kind, "gradient-accumulation:steps=2")
    assert np.isfinite(parts[0]).all()
    assert parts[0] != whole[0]
    if kind == "amax":  # two entries a step
        path = next(iter(parts[1]))
        assert (parts[1][path] > 0).all()
        assert (whole[1][path][..., 3] == 0).all()


@pytest.mark.slow
def test_an_interleaved_pipeline_too():
    feature = "pipeline:microbatches=4,schedule=interleaved,rounds=2"
    tree = patch(config("amax", feature), {"model.decoder.num_layers": 4})
    results = []
    for mesh in ({}, {"pipeline": 2, "fsdp": 4}):
        program = compose(patch(tree, {"mesh.shape": mesh}), jax.devices() if mesh else jax.devices()[:1])
        state, scalars = program.train_step(program.init(seed=0), program.put(toy_models.batch()))
        results.append(([float(scalars["loss"])], jax.device_get(state.variables)))
    same(*results)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dropout", pytest.param("batch-norm", marks=pytest.mark.slow)])
def test_a_restored_state_goes_on_bit_for_bit(kind, tmp_path):
    losses, variables, *_ = trained(kind, mode="unrolled")
    _, _, state, program = trained(kind, mode="unrolled", steps=2)
    checkpointer = ShardedCheckpointer.Config().build(directory=tmp_path)
    checkpointer.save(2, state)
    checkpointer.wait()
    restored, _ = checkpointer.restore(2, program.state)
    with toy_models.quick_to_compile():
        again, scalars = program.train_step(restored, program.put(toy_models.batch(2)))
    checkpointer.close()
    assert float(scalars["loss"]) == losses[2]
    assert all(np.array_equal(again.variables[p], x) for p, x in variables.items())


def test_a_checkpoint_without_the_variables_is_refused(tmp_path):
    _, _, state, program = trained("batch-norm")
    checkpointer = ShardedCheckpointer.Config().build(directory=tmp_path)
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
    functional = Functional.from_config(config("batch-norm").model)
    with pytest.raises(RequestError, match=r"variables of the model are missing: decoder\..*and \d+ more"):
        functional.bind(functional.abstract)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["amax", "router-bias"])
def test_a_skipped_step_keeps_the_variables(kind):
    _, _, state, program = trained(kind)
    broken = state.replace(params={p: x * np.nan if p == "decoder.norm.weight" else x for p, x in state.params.items()})
    variables = jax.device_get(broken.variables)
    after, scalars = program.train_step(jax.tree.map(lambda x: x.copy(), broken), program.put(toy_models.batch()))
    assert not np.isfinite(float(scalars["loss"]))
    assert all(np.array_equal(after.variables[p], x) for p, x in variables.items())
