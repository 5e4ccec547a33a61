"""In `parity` mode, a training step computes the log-probabilities of its rollouts, bit for bit."""

import pytest

from support.exact_rollouts import FAMILIES, count_differences, start_run

pytestmark = pytest.mark.slow
STEPS = 3


def differences(rows):
    return [row["train_rollout_difference"] for row in rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_have_the_probabilities_of_the_training_step(tmp_path, family):
    """The environment writes tokens between the turns, which the engine reads in chunks."""
    rows = start_run(tmp_path / "run", family=family, turns=3, length=160, steps=STEPS)
    assert differences(rows) == [0.0] * STEPS
    assert all(row["turns"] > 1.5 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize("family", ["dense", "moe"])
@pytest.mark.parametrize(("batch_size", "group_size"), [(1, 4), (5, 3), (24, 4)])
def test_any_batch_size_has_the_probabilities_of_the_training_step(tmp_path, family, batch_size, group_size):
    """The largest batch has more rollouts than the engine has rows."""
    rows = start_run(
        tmp_path / "run", family=family, batch_size=batch_size, group_size=group_size, length=24, steps=STEPS
    )
    assert differences(rows) == [0.0] * STEPS


def test_rollouts_that_run_ahead_have_the_probabilities_of_their_version(tmp_path):
    run = tmp_path / "run"
    rows = start_run(run, turns=3, length=160, ahead=1, steps=STEPS)
    first, *later = differences(rows)
    assert first == 0.0
    assert min(later) > 0
    count, differing = count_differences(run, step=STEPS, version=STEPS - 2)
    assert count > 20
    assert differing == 0
    assert count_differences(run, step=STEPS, version=STEPS - 1, drawn_by=STEPS - 2)[1] > 0


def test_fast_mode_reports_its_difference(tmp_path):
    rows = start_run(tmp_path / "run", turns=3, length=160, mode="fast", steps=STEPS)
    assert 0 < max(differences(rows)) < 1e-4
