import attrs
import pytest

from axlearn_plugins_rl.rollout_contracts import Score
from axlearn_plugins_rl.rollout_metrics import combine_times, summarize_groups
from support.rollout_groups import group


def test_means_leave_out_rollouts_with_errors():
    values = summarize_groups([group((1.0, 0.0, 5.0), errors=(2,)), group((1.0, 1.0), number=1)])
    assert values["reward"] == pytest.approx(0.75)
    assert values["reward_std"] == pytest.approx(0.4330127)
    assert values["reward_exact"] == pytest.approx(0.75)
    assert values["reward_errors"] == pytest.approx(0.2)
    assert values["dead_groups"] == 0.5
    assert values["answer_length"] == 2.0


def test_shares_of_unfinished_and_failed_rollouts():
    values = summarize_groups([group((1.0, 0.0), finish="length"), group((1.0, 0.0), finish="error")])
    assert values["unfinished"] == 0.5
    assert values["rollout_errors"] == 0.5
    assert values["reward"] == 0.5  # of the first group


def test_metrics_are_averaged_over_the_rollouts_that_have_them():
    first, second = group((1.0, 0.0), metrics={"turns": 3.0}), group((1.0, 0.0))
    assert summarize_groups([first, second])["turns"] == 3.0


def test_a_failure_that_counts_as_zero_is_an_error_too():
    one = group((0.0, 1.0))
    failed = Score(value=0.0, metrics={"reward_errors": 1.0})
    values = summarize_groups([attrs.evolve(one, scores=(failed, one.scores[1]))])
    assert values["reward_errors"] == 0.5
    assert values["reward"] == 0.5


def test_a_batch_in_which_every_reward_failed_has_no_reward():
    values = summarize_groups([group((1.0, 0.0), errors=(0, 1))])
    assert "reward" not in values
    assert values["reward_errors"] == 1.0


def test_times_of_processes_that_work_together_are_those_of_the_slowest():
    rows = [
        {"rollout_seconds": 2.0, "rollout_tokens_per_second": 10.0, "weight_sync_seconds": 0.5},
        {"rollout_seconds": 4.0, "rollout_tokens_per_second": 15.0, "weight_sync_seconds": 0.25},
    ]
    assert combine_times(rows) == {
        "rollout_seconds": 4.0,
        "rollout_tokens_per_second": (2 * 10 + 4 * 15) / 4,
        "weight_sync_seconds": 0.5,
    }
    assert combine_times(rows[:1]) == rows[0]
