"""Rows of a batch against their definition, token by token."""

import attrs
import numpy as np
import pytest

from axlearn_core.config import check
from axlearn_core.errors import ConfigError, WorkError
from axlearn_plugins_rl.rollout_rows import build_rows
from axlearn_plugins_rl.task_input import ROW_ARRAYS, TaskInput
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer
from support.rollout_groups import Sums, group

CONFIG = TaskInput.Config(
    task=Sums.Config(), tokenizer=ByteTokenizer.Config(), batch_size=2, group_size=2, sequence_length=8
)


def advantages(groups, value=2.0):
    return [
        [[np.full(sum(len(s.tokens) for s in t), value, np.float32) for t in r.trajectories] for r in g.rollouts]
        for g in groups
    ]


def rows(groups, **options):
    return build_rows(groups, advantages(groups), CONFIG, **{"temperature": 0.7, **options})


def test_a_row_has_the_shapes_and_dtypes_that_the_input_declares():
    batch = rows([group(), group()])
    assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == CONFIG.batch_shapes()
    assert batch["temperature"].tolist() == pytest.approx([0.7] * 4)


def with_experts(source, shape):
    """Return a group whose recorded experts are the numbers of their positions, without the last token."""
    rollouts = []
    for rollout in source.rollouts:
        ((prompt, drawn),) = rollout.trajectories
        count = len(prompt.tokens) + len(drawn.tokens)
        experts = np.broadcast_to(np.arange(count, dtype=np.int16)[:, None, None], (count, *shape)).copy()
        experts[-1] = -1
        parts = np.split(experts, [len(prompt.tokens)])
        segments = tuple(attrs.evolve(s, experts=e) for s, e in zip((prompt, drawn), parts, strict=True))
        rollouts.append(attrs.evolve(rollout, trajectories=(segments,)))
    return attrs.evolve(source, rollouts=tuple(rollouts))


@pytest.mark.parametrize("packing", [False, True])
def test_recorded_experts_are_aligned_with_the_tokens(packing):
    cfg = attrs.evolve(CONFIG, experts=(3, 2), packing=packing, rows=4, sequence_length=12)
    groups = [with_experts(group((1.0, 0.0)), (3, 2))]
    batch = build_rows(groups, advantages(groups), cfg, temperature=1.0)
    experts = batch["layers.experts"]
    assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == cfg.batch_shapes()
    first = [0, 1, 2, 3, 4]
    assert experts[0, :, 2, 1].tolist() == ([*first, *first, -1, -1] if packing else [*first, *[-1] * 7])
    assert (experts[0] == experts[0, :, :1, :1]).all()


def with_kept(source, width):
    """Return a group that records each drawn token as the only one that could be drawn."""
    rollouts = []
    for rollout in source.rollouts:
        ((prompt, drawn),) = rollout.trajectories
        tokens = np.full((len(drawn.tokens), width), -1, np.int32)
        tokens[:, 0] = drawn.tokens
        rollouts.append(attrs.evolve(rollout, trajectories=((prompt, attrs.evolve(drawn, kept=tokens)),)))
    return attrs.evolve(source, rollouts=tuple(rollouts))


def test_kept_tokens_are_aligned_with_the_targets():
    cfg, groups = attrs.evolve(CONFIG, kept_tokens=3), [with_kept(group((1.0, 0.0)), 3)]
    batch = build_rows(groups, advantages(groups), cfg, temperature=1.0)
    assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == cfg.batch_shapes()
    trained = batch["weights"] > 0
    assert (batch["kept_tokens"][trained, 0] == batch["targets"][trained]).all()
    assert (batch["kept_tokens"][~trained] == -1).all()
    with pytest.raises(WorkError, match=r"runner.kept_tokens = 4\n *expected: input.kept_tokens = 3"):
        build_rows([with_kept(group(), 4)], advantages([group()]), cfg, temperature=1.0)


def test_experts_of_another_model_are_refused():
    groups = [with_experts(group(), (4, 2))]
    with pytest.raises(
        WorkError, match=r"got: 4 layers with 2 experts per token\n *expected: input.experts = \[3, 2\]"
    ):
        build_rows(groups, advantages(groups), attrs.evolve(CONFIG, experts=(3, 2)), temperature=1.0)


def test_targets_are_the_next_tokens_and_only_drawn_ones_count():
    batch = rows([group((1.0, 0.0))])
    tokens = [*b"2+3=", *b"1", 256]  # the second rollout
    assert batch["tokens"][1].tolist() == [*tokens[:-1], 0, 0, 0]
    assert batch["targets"][1].tolist() == [*tokens[1:], 0, 0, 0]
    assert batch["weights"][1].tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
    assert batch["positions"][1].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert batch["advantages"][1].tolist() == [0, 0, 0, 2, 2, 0, 0, 0]
    np.testing.assert_allclose(batch["rollout_logprobs"][1], [0, 0, 0, -0.1, -0.2, 0, 0, 0], rtol=1e-6)


def test_the_reward_is_at_the_last_drawn_target():
    assert rows([group((1.0, 3.0))])["rewards"][1].tolist() == [0, 0, 0, 0, 3, 0, 0, 0]


def test_failed_rewards_and_failed_environments_have_no_weight():
    batch = rows([group((1.0, 0.0), errors=(1,)), group((1.0, 0.0), finish="error")])
    assert batch["weights"].sum(axis=1).tolist() == [2, 0, 0, 0]
    assert not batch["advantages"][1:].any()
    assert not batch["rollout_logprobs"][1:].any()


@pytest.mark.parametrize(("drop", "weights"), [(False, [2, 2, 2, 2]), (True, [0, 0, 2, 2])])
def test_dead_groups_are_dropped_only_if_asked(drop, weights):
    batch = rows([group((1.0, 1.0)), group((1.0, 0.0))], drop_dead=drop)
    assert batch["weights"].sum(axis=1).tolist() == weights


def test_too_many_trajectories_name_the_setting():
    forked = group((1.0, 0.0))
    forked = attrs.evolve(
        forked, rollouts=tuple(attrs.evolve(r, trajectories=r.trajectories * 3) for r in forked.rollouts)
    )
    with pytest.raises(WorkError, match=r"6 trajectories.*4 rows(?s:.*)set input.rows to 12"):
        rows([forked])


def test_a_trajectory_that_is_too_long_names_both_limits():
    with pytest.raises(WorkError, match=r"has 13 tokens(?s:.*)at most input.sequence_length \+ 1 = 9"):
        rows([group((1.0,), prompt="1000000+1=5")])


PACKED = attrs.evolve(CONFIG, packing=True, rows=2, sequence_length=12)
GROUPS = [group((1.0, 0.0)), group((0.5, 2.0), prompt="12+31=", number=1)]


def test_packed_rows_hold_what_separate_rows_hold():
    separate = build_rows(GROUPS, advantages(GROUPS), attrs.evolve(CONFIG, sequence_length=12), temperature=0.7)
    packed = build_rows(GROUPS, advantages(GROUPS), PACKED, temperature=0.7)
    assert {k: (v.shape, v.dtype.name) for k, v in packed.items()} == PACKED.batch_shapes()
    assert packed["segment_ids"].tolist() == [[1] * 7 + [2] * 5] * 2, "the longest trajectories come first"
    spans = [(row, slice(*span)) for row in range(2) for span in ((0, 7), (7, 12))]
    lengths = {0: 5, 1: 5, 2: 7, 3: 7}
    in_packed = [[packed[name][row, span].tolist() for name in ROW_ARRAYS] for row, span in spans]
    expected = [[separate[name][row, :length].tolist() for name in ROW_ARRAYS] for row, length in lengths.items()]
    assert sorted(in_packed) == sorted(expected)


def test_trajectories_that_do_not_fit_name_the_setting():
    with pytest.raises(
        WorkError, match=r"4 trajectories, which need 2 rows, but a batch has 1 rows(?s:.*)input.rows to 4"
    ):
        build_rows(GROUPS, advantages(GROUPS), attrs.evolve(PACKED, rows=1), temperature=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing": True}, r"rows: packing needs the number of rows[\s\S]*fix: set rows"),
        ({"rows": 3}, r"rows: a batch has more rollouts than rows[\s\S]*set packing to true"),
    ],
)
def test_the_number_of_rows_is_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        check(attrs.evolve(CONFIG, **options))


def test_a_process_has_its_part_of_the_rows():
    batch = rows([group((1.0, 3.0))], processes=2)
    shapes = {name: ((2, *shape[1:]), dtype) for name, (shape, dtype) in CONFIG.batch_shapes().items()}
    assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == shapes
    whole = rows([group((1.0, 3.0)), group()])
    for name, array in batch.items():
        np.testing.assert_array_equal(array, whole[name][:2])


def test_too_many_trajectories_of_a_process_name_the_rows_of_the_batch():
    with pytest.raises(WorkError, match=r"a process has 2 rows(?s:.*)fix: set input.rows to 16"):
        rows([group(), group()], processes=2)
