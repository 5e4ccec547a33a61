"""The arrays of two checkpoints are compared one at a time."""

import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from axlearn_core.checkpoint.manifest import Checkpoints
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_plugins_tools.reporting import checkpoint_arrays
from axlearn_plugins_tools.reporting.checkpoint_arrays import compare_checkpoints, compare_values, iter_differences
from axlearn_plugins_tools.reporting.comparison import compare_runs, open_run
from support.paths import RUN_OF_LLAMA
from support.written_runs import write_run


@pytest.fixture
def copies(tmp_path):
    for name in ("a", "b"):
        shutil.copytree(RUN_OF_LLAMA, tmp_path / name)
    return open_run(tmp_path / "a"), open_run(tmp_path / "b")


@pytest.mark.parametrize(
    ("second", "count", "relative"),
    [
        ([1, 2, -4], 0, 0.0),
        ([1, 2, -3], 1, 0.25),
        ([np.nan, 2, -4], 1, np.inf),
        ([np.inf, 2, -4], 1, np.inf),
    ],
)
def test_values_are_compared_by_their_bits(second, count, relative):
    first = np.asarray([1, 2, -4], np.float32)
    assert compare_values(first, np.asarray(second, np.float32)) == (count, relative)


def test_equal_nans_are_equal_and_signed_zeros_are_not():
    nan = np.asarray([np.nan, 0.0], np.float32)
    assert compare_values(nan, nan.copy()) == (0, 0.0)
    assert compare_values(nan, np.asarray([np.nan, -0.0], np.float32)) == (1, 0.0)


def test_other_dtypes_are_compared_by_value():
    first = np.asarray([1.0, 2.0], np.float32)
    assert compare_values(first, first.astype(ml_dtypes.bfloat16)) == (0, 0.0)
    assert compare_values(np.asarray([3], np.uint32), np.asarray([4], np.uint32)) == (1, 0.25)


def test_large_arrays_are_compared_in_parts(monkeypatch):
    monkeypatch.setattr(checkpoint_arrays, "_CHUNK", 4)
    first = np.arange(10, dtype=np.float32).reshape(2, 5)
    second = first.copy()
    second[1, 4] = 18.0
    second[0, 0] = 1.0
    assert compare_values(first, second) == (2, 0.5)


def save(folder, **arrays):
    shutil.rmtree(folder, ignore_errors=True)
    return open_run(write_run(folder, checkpoints={2: {p.replace("_", "."): x for p, x in arrays.items()}}))


def test_each_kind_of_difference_is_named(tmp_path, monkeypatch):
    ones = jnp.ones((2, 2), jnp.float32)
    first = save(
        tmp_path / "a", params_same=ones, params_value=ones, params_shape=ones, params_gone=ones, learner_mu=ones
    )
    second = save(
        tmp_path / "b", params_same=ones, params_value=ones.at[0, 0].set(2), params_shape=ones[0], learner_mu=3 * ones
    )
    monkeypatch.setattr(checkpoint_arrays, "_open", open_reader)
    differences = {d.path: d for d in iter_differences(first, second, 2)}
    assert differences.keys() == {"params.value", "params.shape", "params.gone", "learner.mu"}
    assert (differences["params.value"].count, differences["params.value"].relative) == (1, 0.5)
    assert (differences["params.shape"].first, differences["params.shape"].second) == ("float32[2, 2]", "float32[2]")
    assert differences["params.gone"].second == "(absent)"
    common = compare_checkpoints(first, second, compare_runs(first, second).checkpoints)
    assert common.differences is not None
    paths = [d.path for d in common.differences]
    assert paths[-1] == "learner.mu", "weights come first"
    assert common.arrays == 5


class open_reader:
    """A checkpoint that is read without the config of a model."""

    def __init__(self, run, step):
        from axlearn_core.checkpoint.reader import CheckpointReader

        place: Checkpoints = run.checkpoints
        self.reader = CheckpointReader(place, place.inspect(step))
        self.arrays = self.reader.manifest.arrays

    def read(self, like):
        return self.reader.read(dict.fromkeys(like))


def test_a_run_is_equal_to_its_copy_without_reading_arrays(copies, monkeypatch):
    first, second = copies
    monkeypatch.setattr(checkpoint_arrays, "_open", None)
    common = compare_checkpoints(first, second, compare_runs(first, second).checkpoints, step=10)
    assert (common.step, common.differences) == (10, ())


def test_the_arrays_of_a_real_run_are_read_and_equal(copies):
    first, second = copies
    assert list(iter_differences(first, second, 20)) == []


def test_a_step_that_is_not_common_is_refused(copies):
    first, second = copies
    with pytest.raises(RequestError, match=r"no common checkpoint at step 15\n    expected: 10, 20"):
        compare_checkpoints(first, second, compare_runs(first, second).checkpoints, step=15)


def test_a_damaged_array_is_an_error_with_a_way_out(copies, monkeypatch):
    first, second = copies
    monkeypatch.setattr(checkpoint_arrays, "has_same_arrays", lambda *_: False)
    common = compare_runs(first, second).checkpoints
    file = next((second.storage.root / "checkpoints/10/state/weights").glob("*.bin"))
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"step 10 cannot be compared: (.|\n)*--no-arrays"):
        compare_checkpoints(first, second, common, step=10)
