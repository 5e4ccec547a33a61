"""Steps that are run again: the sketches of arrays, the hashes of batches, and a real run."""

import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.compose import TrainState
from axlearn_core.errors import RequestError
from axlearn_plugins_tools.reporting.comparison import open_run
from axlearn_plugins_tools.reporting.rerun import hash_batch, rerun, sketch
from support import api_runs
from support.written_runs import write_run

ARRAYS = {
    "float": jnp.asarray(np.linspace(-1, 1, 300, dtype=np.float32).reshape(3, 100)),
    "half": jnp.asarray(np.linspace(0, 1, 64).astype(jnp.bfloat16)),
    "four": jnp.asarray([1, 2, 3], jnp.int4),
    "flags": jnp.asarray([True, False, True]),
    "count": jnp.asarray(5, jnp.int32),
}


def state(**changes):
    return TrainState(step=jnp.zeros(()), params=ARRAYS | changes, variables={}, rng=jnp.zeros(2), learner=())


@pytest.mark.slow
def test_equal_arrays_have_equal_sketches():
    assert sketch(state()).compare(sketch(state())) == {}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("float", lambda x: x.at[1, 7].add(1e-6)),
        ("half", lambda x: x.at[3].multiply(-1)),
        ("four", lambda x: jnp.asarray([1, 3, 3], jnp.int4)),
        ("flags", lambda x: jnp.asarray([True, True, False])),
        ("count", lambda x: jnp.asarray(6, jnp.int32)),
        ("float", lambda x: x.at[0, 0].set(jnp.nan)),
        ("float", lambda x: x[:, ::-1]),
    ],
)
def test_one_changed_element_changes_the_sketch(name, change):
    value = change(ARRAYS[name])
    assert sketch(state()).compare(sketch(state(**{name: value}))).keys() == {f"params.{name}"}


@pytest.mark.parametrize("size", [1e-3, 0.1])
def test_the_estimate_is_close_to_the_relative_difference(size):
    noise = np.random.default_rng(0).normal(size=(3, 100)).astype(np.float32)
    x = np.asarray(ARRAYS["float"])
    changed = x + size * np.linalg.norm(x) / np.linalg.norm(noise) * noise
    [estimate] = sketch(state()).compare(sketch(state(float=jnp.asarray(changed)))).values()
    assert size / 3 < estimate < 3 * size


def test_an_array_of_one_side_and_nan_are_infinitely_far():
    other = sketch(state(more=jnp.ones(2), float=ARRAYS["float"].at[0, 0].set(jnp.inf)))
    assert sketch(state()).compare(other) == {"params.float": np.inf, "params.more": np.inf}


def test_the_hash_of_a_batch_depends_on_names_shapes_dtypes_and_values():
    tokens = np.arange(6, dtype=np.int32)
    batches = [
        {"tokens": tokens},
        {"labels": tokens},
        {"tokens": tokens.reshape(2, 3)},
        {"tokens": tokens.astype(np.uint32)},
        {"tokens": tokens + 1},
        {"tokens": tokens[:0]},
    ]
    assert len({hash_batch(batch) for batch in batches}) == len(batches)
    assert hash_batch({"tokens": tokens.copy()}) == hash_batch(batches[0])


def test_a_directory_that_is_not_a_trained_run_is_refused(tmp_path):
    write_run(tmp_path / "a")
    (tmp_path / "a/config.yaml").unlink()
    with pytest.raises(RequestError, match="is not a run of a trainer"):
        rerun(open_run(tmp_path / "a"), 0, 1)


@pytest.mark.slow
def test_steps_of_a_run_are_reproduced_from_a_checkpoint_and_the_start(tmp_path):
    api_runs.train(tmp_path / "a", steps=4, **{"checkpointer.every_steps": 2})
    run = open_run(tmp_path / "a")
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    whole, later = rerun(run, 0, 4), rerun(run, 2, 4)
    assert [s.scalars["loss"] for s in whole.steps] == api_runs.losses(tmp_path / "a")
    assert [s.batch for s in later.steps] == [s.batch for s in whole.steps[2:]]
    assert later.arrays.compare(whole.steps[1].arrays) == {}
    assert later.steps[-1].arrays.compare(whole.steps[-1].arrays) == {}
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before, "nothing is written"
    changed = rerun(run, 2, 4, {})
    assert 0 < max(changed.arrays.compare(later.arrays).values()) < 1e-5
    run.__dict__["lock"] = {**run.lock, "data": {**run.lock["data"], "hash": "other"}}
    with pytest.raises(RequestError, match=r"changed, so its steps cannot be run again\n(.|\n)*--max-runs 0"):
        rerun(run, 0, 1)
