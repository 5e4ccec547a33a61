import json

import numpy as np
import pytest

from axlearn_plugins_rl.advantages import BatchAdvantage, GroupAdvantage, RewardAdvantage
from axlearn_plugins_rl.group_scores import decode_scores, encode_scores
from axlearn_plugins_rl.rollout_metrics import mean_pass_at, summarize_groups
from support.rollout_groups import group

GROUPS = [
    group((1.0, 0.25), number=3, metrics={"turns": 2.0}),
    group((0.5, 0.0), number=4, errors=(1,)),
    group((1.0, 1.0), number=5, finish="length"),
    group((0.0, 0.125), number=6),
]


def exchanged(groups):
    return [decode_scores(json.loads(json.dumps(encode_scores(group)))) for group in groups]


def test_scores_of_another_process_have_the_same_metrics():
    assert summarize_groups(exchanged(GROUPS)) == summarize_groups(GROUPS)
    assert mean_pass_at(exchanged(GROUPS), 2, 0.5) == mean_pass_at(GROUPS, 2, 0.5)
    assert [g.example.id for g in exchanged(GROUPS)] == ["3", "4", "5", "6"]


def test_scores_hold_no_tokens():
    tokens = exchanged(GROUPS)[0].rollouts[0].trajectories[0][0].tokens
    assert (len(tokens), tokens.strides) == (2, (0,))
    assert "tokens" not in json.dumps(encode_scores(GROUPS[0]))


@pytest.mark.parametrize(
    "advantage",
    [
        GroupAdvantage.Config(),
        GroupAdvantage.Config(scale="batch"),
        BatchAdvantage.Config(),
        BatchAdvantage.Config(group_baseline=True, weighting="rollouts"),
        RewardAdvantage.Config(baseline=0.5),
    ],
    ids=["group", "batch-scale", "batch", "batch-baseline", "running-mean"],
)
def test_advantages_of_a_share_use_the_rewards_of_the_whole_batch(advantage):
    whole, parts = advantage.build(), [advantage.build(), advantage.build()]
    others = exchanged(GROUPS)
    for _ in range(2):  # the running mean changes
        expected = whole.compute(GROUPS)
        first = parts[0].compute(GROUPS[:2], [*GROUPS[:2], *others[2:]])
        second = parts[1].compute(GROUPS[2:], [*others[:2], *GROUPS[2:]])
        for rollouts, same in zip([*first, *second], expected, strict=True):
            for trajectories, others_of_it in zip(rollouts, same, strict=True):
                np.testing.assert_array_equal(trajectories[0], others_of_it[0])
