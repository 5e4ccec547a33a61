"""Rollouts as JSONL."""

import json

import attrs
import numpy as np
import pytest

from axlearn_core.errors import InputError
from axlearn_plugins_rl.rollout_contracts import Example, Group, Score
from axlearn_plugins_rl.rollout_records import UNSCORED, read_rollouts, write_rollouts
from support.rl_rewards import FOUR, rollout_of

CHAT = Example(
    id="chat", prompt=({"role": "user", "content": "2 + 2?"},), answer={"sum": [4]}, tools=({"type": "function"},)
)
GROUPS = (
    Group(
        example=FOUR,
        rollouts=(rollout_of("4"), rollout_of("ü\u2028\n", seed=2)),
        scores=(Score(value=1.0), Score(value=0.5)),
    ),
    Group(example=FOUR, rollouts=(rollout_of("5"),), scores=(Score(value=0.0, parts={"a": 1.0}, metrics={"n": 2.0}),)),
    Group(
        example=CHAT,
        rollouts=(
            rollout_of("", CHAT, finish="error", error="no tools", messages=({"role": "assistant", "content": ""},)),
            rollout_of("cut\ud800", CHAT, finish="length", metrics={"turns": 2.0}),
        ),
        scores=(Score(value=0.0, error="the rollout failed: no tools"), Score(value=0.0, error=UNSCORED)),
    ),
)


def flat(group):
    return attrs.asdict(group, value_serializer=lambda _, __, v: v.tolist() if isinstance(v, np.ndarray) else v)


def test_rollouts_are_read_as_written(tmp_path):
    path = tmp_path / "new" / "rollouts.jsonl"
    write_rollouts(path, GROUPS, step=3, logprobs=True)
    assert [flat(group) for group in read_rollouts(path)] == [flat(group) for group in GROUPS]
    lines = path.read_bytes().split(b"\n")
    assert "ü".encode() in lines[1]
    assert all(json.loads(line)["step"] == 3 for line in lines[:-1])
    assert [*path.parent.iterdir()] == [path]


def test_tokens_and_logprobs_are_optional(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, GROUPS)
    assert '"tokens"' in path.read_text()
    assert "logprobs" not in path.read_text()
    write_rollouts(path, GROUPS, tokens=False)
    assert "tokens" not in path.read_text()
    assert [group.rollouts[0].trajectories for group in read_rollouts(path)] == [(), (), ()]


def test_logprobs_are_short_and_exact(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    rollout = rollout_of("x")
    prompt, answer = rollout.trajectories[0]
    values = np.array([-0.1, -1e-8, -np.inf, -2 / 3], np.float32)
    rollout = attrs.evolve(rollout, trajectories=((prompt, attrs.evolve(answer, logprobs=values)),))
    write_rollouts(path, [Group(example=FOUR, rollouts=(rollout,), scores=(Score(value=0.0),))], logprobs=True)
    assert '"logprobs": [-0.1, -1e-08, null, -0.6666667]' in path.read_text()
    (group,) = read_rollouts(path)
    np.testing.assert_array_equal(group.rollouts[0].trajectories[0][1].logprobs[[0, 1, 3]], values[[0, 1, 3]])


def test_records_only_need_an_id_and_a_text(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"id": "a", "text": "4", "extra": 1}\n\n{"id": "a", "text": "5", "reward": 1}\n')
    (group,) = read_rollouts(path)
    assert [r.text for r in group.rollouts] == ["4", "5"]
    assert group.scores == (Score(value=0.0, error=UNSCORED), Score(value=1.0))
    assert group.example == Example(id="a", prompt="")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "a", "txt": "4"}', r"line 2: has no field 'text'[^$]*nearest: txt[^$]*expected: \{\"id\""),
        ('{"id": 3, "text": "4"}', r"line 2: id is a int\n    expected: str"),
        ('{"id": null, "text": "4"}', "id is a NoneType"),
        ('{"id": "a", "text": "4", "reward": "1"}', r"reward is a str\n    expected: int or float"),
        ('{"id": "a", "text": "4", "reward": true}', "reward is a bool"),
        ('{"id": "a", "text": "4", "finish": "done"}', r"finish is 'done'\n    expected: one of stop, length, error"),
        ('{"id": "a", "text": "4", "prompt": [{"role": "me"}]}', r"messages\[0\] has the role 'me'"),
        ('{"id": "a", "text": "4", "trajectories": [[{"token": [1]}]]}', "trajectories cannot be read"),
        ('{"id": "a", "text": "4", "trajectories": [3]}', "trajectories cannot be read"),
        ('{"id": "a", "text": "4", "trajectories": [[{"tokens": [5000000000]}]]}', "trajectories cannot be read"),
        ("[1]", "line 2: is a list"),
        ('{"id": "a"', "line 2: is not JSON"),
        ("\udcff", "is not UTF-8"),
    ],
)
def test_invalid_records_are_located(tmp_path, line, message):
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b'{"id": "a", "text": "4"}\n' + line.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match=message):
        read_rollouts(path)


def test_missing_files_are_reported(tmp_path):
    (tmp_path / "rollouts.jsonl").write_text("{}")
    with pytest.raises(InputError, match=r"no data file matches[^$]*did you mean: .*rollouts.jsonl"):
        read_rollouts(tmp_path / "rolouts.jsonl")
