"""Advantages against their definitions, on groups with different lengths, errors and equal rewards."""

import numpy as np
import pytest

from axlearn_plugins_rl.advantages import BatchAdvantage, GroupAdvantage, RewardAdvantage
from axlearn_plugins_rl.rollout_contracts import Example, Group, Rollout, Score, Segment


def make_group(rewards, lengths=None, name="a"):
    """Return a group whose rollouts have a prompt of two tokens and answers; a reward of None is an error."""
    example = Example(id=name, prompt="?")
    lengths = lengths or [3] * len(rewards)

    def rollout(seed, length):
        zeros = np.zeros(length, np.float32)
        drawn = Segment(tokens=np.arange(length), drawn=True, logprobs=zeros, model_logprobs=zeros, version=0)
        return Rollout(
            example=example, seed=seed, trajectories=((Segment(tokens=np.arange(2)), drawn),), text="", messages=()
        )

    scores = tuple(Score(value=0.0, error="failed") if r is None else Score(value=r) for r in rewards)
    return Group(example=example, rollouts=tuple(map(rollout, range(len(rewards)), lengths)), scores=scores)


GROUPS = (
    make_group([1.0, 0.0, 0.5, None], [3, 1, 4, 2]),
    make_group([1.0, 1.0, 1.0, 1.0], [2, 2, 2, 9]),
    make_group([None, -3.0, 2.0, 2.5], [1, 5, 3, 2]),
    make_group([None, None, 0.7], [1, 1, 1]),
)


def values_of(advantage, groups=GROUPS):
    """Return the advantage of each rollout. Check that its drawn tokens share it, and that the others have 0."""
    result = []
    for group, rollouts in zip(groups, advantage.compute(groups), strict=True):
        row = []
        for rollout, trajectories in zip(group.rollouts, rollouts, strict=True):
            ((tokens),) = trajectories
            assert tokens.dtype == np.float32
            assert len(tokens) == 2 + rollout.num_drawn
            assert (tokens[:2] == 0).all()
            assert len(set(tokens[2:].tolist())) == 1
            row.append(float(tokens[2]))
        result.append(row)
    return result


def rewards_of(group):
    return [score.value for score in group.scores if score.error is None]


def flatten(rows):
    return [value for row in rows for value in row]


EVERYTHING = np.array([r for group in GROUPS for r in rewards_of(group)])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_a_group_advantage_compares_within_a_group(scale, leave_one_out):
    got = values_of(GroupAdvantage.Config(scale=scale, leave_one_out=leave_one_out).build())
    for group, row in zip(GROUPS, got, strict=True):
        rewards = rewards_of(group)
        for value, score in zip(row, group.scores, strict=True):
            others = list(rewards)
            if score.error is not None or len(set(rewards)) == 1:
                assert value == 0
                continue
            if leave_one_out:
                others.remove(score.value)
            divisor = {
                "none": 1.0,
                "group": np.std(rewards, ddof=1) + 1e-4,
                "batch": np.std(EVERYTHING, ddof=1) + 1e-4,
            }
            np.testing.assert_allclose(value, (score.value - np.mean(others)) / divisor[scale], rtol=1e-6)


@pytest.mark.parametrize("weighting", ["tokens", "rollouts"])
@pytest.mark.parametrize("group_baseline", [False, True])
def test_a_batch_advantage_standardizes_over_the_batch(weighting, group_baseline):
    config = BatchAdvantage.Config(weighting=weighting, group_baseline=group_baseline)
    flat, copies = [], []
    for group in GROUPS:
        rewards = rewards_of(group)
        for rollout, score in zip(group.rollouts, group.scores, strict=True):
            value = score.value - (np.mean(rewards) if group_baseline else 0.0)
            flat.append(None if score.error is not None else value)
            if score.error is None:
                copies += [value] * (rollout.num_drawn if weighting == "tokens" else 1)
    expected = [0.0 if x is None else (x - np.mean(copies)) / (np.std(copies) + 1e-8) for x in flat]
    np.testing.assert_allclose(flatten(values_of(config.build())), expected, rtol=1e-5, atol=1e-7)


def test_a_reward_advantage_is_the_reward():
    got = values_of(RewardAdvantage.Config().build())
    expected = [[0.0 if s.error is not None else s.value for s in group.scores] for group in GROUPS]
    np.testing.assert_allclose(flatten(got), flatten(expected), rtol=1e-6)


def test_a_running_baseline_continues_from_its_state():
    batches = [(make_group([float(i), i + 1.0]),) for i in range(3)]
    whole, first = RewardAdvantage.Config(baseline=0.75).build(), RewardAdvantage.Config(baseline=0.75).build()
    got = [values_of(whole, batch)[0] for batch in batches]
    assert got[0] == [-0.5, 0.5]
    assert got[1] == [0.5, 1.5]  # the baseline is the mean of the first batch, 0.5
    assert got[2] == [2.0 - 0.75, 3.0 - 0.75]  # 0.75 * 0.5 + 0.25 * 1.5
    values_of(first, batches[0])
    resumed = RewardAdvantage.Config(baseline=0.75).build()
    resumed.set_state(first.get_state())
    assert [values_of(resumed, batch)[0] for batch in batches[1:]] == got[1:]


@pytest.mark.parametrize(
    "config", [GroupAdvantage.Config(), BatchAdvantage.Config(), RewardAdvantage.Config(baseline=0.9)]
)
def test_batches_without_rewards_have_no_advantages(config):
    assert values_of(config.build(), (make_group([None, None]),)) == [[0.0, 0.0]]
