"""What differs between two runs, by their files."""

import math

import numpy as np
import pytest

from axlearn_core.errors import CheckpointError
from axlearn_plugins_tools.reporting.comparison import (
    ABSENT,
    Difference,
    compare_runs,
    compare_scalars,
    describe_counts,
    open_run,
    relative_difference,
)
from support.written_runs import LOCK, record, write_run


def compare(tmp_path, **second):
    checkpoints = {2: {"params.a": np.ones(3, np.float32)}} if "checkpoints" in second else None
    first = open_run(write_run(tmp_path / "a", checkpoints=checkpoints))
    return compare_runs(first, open_run(write_run(tmp_path / "b", **second)))


def test_a_copy_is_equal_even_if_its_timings_differ(tmp_path):
    comparison = compare(tmp_path, records=[record(s, elapsed_seconds=1.0, step_seconds=9.0) for s in (1, 2, 4)])
    assert comparison.equal
    assert comparison.timeline == []


@pytest.mark.parametrize(
    ("changes", "part", "name"),
    [
        ({"rate": 0.2}, "config", "learner.rate"),
        ({"seed": 1}, "seeds", "seed"),
        ({"lock": LOCK | {"versions": {"jax": "0.12.0"}}}, "versions", "jax"),
        ({"lock": LOCK | {"python": "3.12.0"}}, "versions", "python"),
        ({"lock": LOCK | {"devices": "8 x cpu"}}, "devices", "devices"),
        ({"lock": LOCK | {"flags": {"XLA_FLAGS": "--x"}}}, "devices", "flags.XLA_FLAGS"),
        ({"lock": LOCK | {"data": {**LOCK["data"], "content": "c1"}}}, "data", "content"),
        ({"lock": LOCK | {"data": {**LOCK["data"], "tokenizer": "t1"}}}, "data", "tokenizer"),
        ({"lock": LOCK | {"hlo_fingerprint": "f1"}}, "program", "hlo_fingerprint"),
    ],
)
def test_each_kind_of_difference_has_its_part(tmp_path, changes, part, name):
    comparison = compare(tmp_path, **changes)
    assert not comparison.equal
    assert name in [d.name for d in comparison.parts[part]]
    assert [p for p, differences in comparison.parts.items() if differences] in ([part], ["devices"])
    assert comparison.timeline[0][:2] == (0, part)


def test_a_config_difference_names_the_value_and_what_set_it(tmp_path):
    [difference] = compare(tmp_path, rate=0.2).parts["config"]
    assert (difference.first, difference.second) == (0.1, 0.2)
    assert difference.sources == ("--set learner.rate=0.2",) * 2


def test_settings_that_keep_the_mathematics_are_known(tmp_path):
    assert compare(tmp_path / "same", rate=0.2).same_mathematics
    assert compare(tmp_path / "other", rate=0.2, lock=LOCK | {"hash": "bbbb"}).same_mathematics is False


def test_the_first_step_is_found_for_each_scalar():
    first = [record(s, grad_norm=1.0, lr=0.5) for s in (1, 2, 3, 4)]
    second = [record(s, grad_norm=1.0 + 1e-7 * (s > 1) + 0.1 * (s > 3), lr=0.5) for s in (1, 2, 3, 4, 5)]
    scalars = compare_scalars(first, second, 1e-3)
    [difference] = scalars.differences
    assert (difference.name, difference.first.step) == ("grad_norm", 2)
    assert difference.beyond is not None
    assert difference.beyond.step == difference.largest.step == 4
    assert (scalars.last_equal_step, scalars.first_step, scalars.first_step_beyond) == (1, 2, 4)
    assert scalars.last == (4, 5)
    assert scalars.steps == (1, 2, 3, 4)


def test_scalars_that_are_not_finite_are_compared():
    def lost(step, text):
        return record(step) | {"loss": None, "nonfinite": {"loss": text}}

    assert not compare_scalars([lost(1, "nan")], [lost(1, "nan")]).differences
    [difference] = compare_scalars([lost(1, "nan")], [record(1)]).differences
    assert difference.first.relative == math.inf
    assert relative_difference(math.inf, -math.inf) == math.inf
    assert relative_difference(0.0, 0.0) == 0.0
    assert relative_difference(1.0, 2.0) == 0.5


def test_runs_without_a_common_step_or_of_other_length_differ(tmp_path):
    comparison = compare(tmp_path, records=[record(3)])
    assert comparison.scalars.steps == ()
    assert comparison.scalars.last_equal_step is None
    assert not comparison.equal


def test_equal_checkpoints_are_known_by_their_hashes(tmp_path):
    comparison = compare(tmp_path, checkpoints={2: {"params.a": np.ones(3, np.float32)}})
    assert comparison.equal
    assert comparison.checkpoints.steps == (2,)
    assert comparison.checkpoints.differences == ()


def test_checkpoints_with_other_arrays_are_named_but_not_read(tmp_path):
    comparison = compare(tmp_path, checkpoints={2: {"params.a": np.zeros(3, np.float32)}})
    assert comparison.checkpoints.differing == (2,)
    assert comparison.checkpoints.differences is None
    assert not comparison.equal


def test_what_a_run_lacks_is_a_note(tmp_path):
    comparison = compare(tmp_path, lock=None)
    assert any("has no run.lock.json, so versions, devices and data cannot be compared" in n for n in comparison.notes)
    derived = compare(tmp_path / "more", lock={"made_from": "runs/base"})
    assert any("has no versions" in note for note in derived.notes)
    assert not derived.parts["versions"]


def test_a_value_of_one_run_is_absent_in_the_other(tmp_path):
    [difference] = compare(tmp_path, lock=LOCK | {"versions": {"jax": "0.10.2", "extra": "1"}}).parts["versions"]
    assert (difference.name, difference.first, difference.second) == ("extra", ABSENT, "1")


def test_a_misspelled_run_gets_the_nearest_names(tmp_path):
    write_run(tmp_path / "baseline")
    with pytest.raises(CheckpointError, match=r"does not exist\n    did you mean: .*baseline"):
        open_run(tmp_path / "baselin")
    (tmp_path / "notes").mkdir()
    with pytest.raises(CheckpointError, match=r"has no config\.yaml"):
        open_run(tmp_path / "notes")


def test_counts_are_in_plain_words():
    one = (Difference("x", 1, 2),)
    assert describe_counts({"config": one * 2, "seeds": one, "data": one * 2, "versions": ()}) == (
        "2 config values, 1 seed, 2 facts about the data"
    )
