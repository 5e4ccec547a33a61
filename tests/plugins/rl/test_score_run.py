"""`axlearn rl score` and `axlearn rl sample`, and the summary of their scores."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_plugins_rl.rollout_contracts import Group, Score
from axlearn_plugins_rl.rollout_records import read_rollouts
from axlearn_plugins_rl.score_run import summarize_scores
from support.paths import RUN_OF_LLAMA
from support.rl_rewards import FOUR, rollout_of

TASK = "jsonl-task:paths=task.jsonl"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"id": "one", "prompt": "2 + 2 = ", "answer": "4"}, {"id": "two", "prompt": "3 + 4 = ", "answer": "7"}]
    Path("task.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    answers = [("one", "4"), ("one", "5"), ("two", "7"), ("two", "<answer>7</answer>")]
    Path("answers.jsonl").write_text("".join(f'{{"id": "{name}", "text": "{text}"}}\n' for name, text in answers))


def run(*words):
    result = CliRunner().invoke(cli, ["rl", *words])
    return result.exit_code, result.output


def summary(*words):
    result = CliRunner().invoke(cli, ["rl", *words, "--json"])
    assert result.exit_code == 0, result.output
    return {entry["name"]: entry["value"] for entry in json.loads(result.stdout)}


def group_of(*values, example=FOUR):
    scores = tuple(Score(value=0.0, error="broken") if v is None else Score(value=v) for v in values)
    return Group(example=example, rollouts=tuple(rollout_of("x") for _ in values), scores=scores)


def test_rewards_and_pass_at_k_are_means_over_examples():
    groups = [group_of(1.0, 0.0, 0.0, 0.0), group_of(1.0, 1.0, 1.0, 1.0), group_of(0.0, 0.5, None, 0.5)]
    values = summarize_scores(groups, attempts=(1, 2, 4), solved=1.0)
    assert values["reward"] == pytest.approx((0.25 + 1.0 + 1 / 3) / 3)
    assert values["pass_at_1"] == pytest.approx((0.25 + 1.0) / 3)
    assert values["pass_at_2"] == pytest.approx((0.5 + 1.0) / 3)
    assert values["pass_at_4"] == pytest.approx(2 / 3)
    # The sample standard deviation of 1/4, 1 and 0, divided by the root of 3.
    assert values["pass_at_1_stderr"] == pytest.approx(0.300463, abs=1e-6)
    assert (values["examples"], values["rollouts"]) == (3, 12)


def test_groups_with_too_few_rollouts_are_left_out():
    values = summarize_scores([group_of(1.0), group_of(0.0, 1.0)], attempts=(1, 2, 4))
    assert (values["pass_at_1"], values["pass_at_2"]) == (0.75, 1.0)
    assert "pass_at_4" not in values
    assert "pass_at_2_stderr" not in values


def test_rollouts_of_other_programs_are_scored():
    values = summary("score", TASK, "answers.jsonl", "--out", "scored.jsonl")
    assert (values["reward"], values["pass_at_1"], values["pass_at_2"]) == (0.75, 0.75, 1.0)
    groups = read_rollouts("scored.jsonl")
    assert [[s.value for s in group.scores] for group in groups] == [[1.0, 0.0], [1.0, 1.0]]
    assert [group.example.prompt for group in groups] == ["2 + 2 = ", "3 + 4 = "]
    again = summary("score", TASK, "scored.jsonl", "--reward", "format")
    assert again["reward"] == 0.25


def test_an_answer_below_the_solved_reward_does_not_count():
    words = ("score", TASK, "answers.jsonl", "--reward", "weighted:parts={exact: 0.5}", "--seed", "3")
    assert summary(*words)["pass_at_1"] == 0.0
    assert summary(*words, "--solved", "0.5")["pass_at_1"] == 0.75


def test_tasks_and_rewards_can_be_files():
    Path("task.yaml").write_text("type: chat-task\nbase: {type: jsonl-task, paths: task.jsonl}\n")
    Path("reward.yaml").write_text("type: weighted\nparts: {exact: 1.0, format: 0.5}\n")
    values = summary("score", "task.yaml", "answers.jsonl", "--reward", "reward.yaml")
    assert (values["reward"], values["reward_exact"], values["reward_format"]) == (0.875, 0.75, 0.25)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("score", "jsonl-tusk:paths=task.jsonl", "answers.jsonl"), "did you mean: jsonl-task"),
        (("score", "jsonl-task:path=task.jsonl", "answers.jsonl"), "did you mean: paths"),
        (("score", "exact", "answers.jsonl"), r"not a task\n    got: ExactReward"),
        (("score", TASK, "answers.jsonl", "--reward", "jsonl-task:paths=task.jsonl"), "not a reward"),
        (("score", TASK, "answers.jsonl", "--reward", "task"), "does not score answers"),
        (("score", TASK, "answers.jsonl", "--reward", "exact:pattern=("), "pattern: is not a regular expression"),
        (("score", TASK, "missing.jsonl"), "no data file matches 'missing.jsonl'"),
        (("score", TASK, "task.jsonl"), r"line 1: has no field 'text'"),
        (("score", TASK, "answers.jsonl", "--out", "task.jsonl"), "task.jsonl exists already"),
        (("score", "missing.yaml", "answers.jsonl"), "cannot read missing.yaml: No such file"),
        (("score", "list.yaml", "answers.jsonl"), r"list.yaml: \(root\): is not a component"),
        (("score", "wrong.yaml", "answers.jsonl"), r"wrong.yaml:2: path: unknown key[^$]*did you mean: paths"),
        (("score", TASK, "other.jsonl"), r"no example 'three'[^$]*got: 2 examples, such as 'one'"),
        (("score", TASK, "changed.jsonl"), r"example 'one' of the task differs[^$]*2 \+ 2[^$]*expected: [^$]*2 \+ 3"),
        (("sample", "missing"), "missing"),
        (("sample", str(RUN_OF_LLAMA), "--step", "999"), "no checkpoint of step 999"),
        (("sample", "missing", "--out", "task.jsonl"), "exists already"),
    ],
)
def test_invalid_requests_are_reported(words, message):
    Path("list.yaml").write_text("- exact\n")
    Path("wrong.yaml").write_text("type: jsonl-task\npath: task.jsonl\n")
    Path("other.jsonl").write_text('{"id": "three", "text": "4"}\n')
    Path("changed.jsonl").write_text('{"id": "one", "prompt": "2 + 3 = ", "text": "4"}\n')
    before = Path("task.jsonl").read_bytes()
    code, output = run(*words)
    assert code == 2, output
    assert re.search(message, output), output
    assert Path("task.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_model_answers_the_examples_of_a_task():
    size = ["model.decoder.num_layers=1", "model.decoder.hidden_dim=32", "input.sequence_length=32", "evaluators={}"]
    settings = [word for text in size for word in ("--set", text)]
    trained = CliRunner().invoke(cli, ["train", "quickstart", "--steps", "1", "--run-dir", "run", *settings])
    assert trained.exit_code == 0, trained.output
    words = ("sample", "run", "--task", TASK, "--split", "train", "-n", "4", "--set", "max_tokens=6")
    values = summary(*words, "--out", "one.jsonl")
    assert (values["examples"], values["rollouts"]) == (2, 8)
    assert 0 < values["answer_length"] <= 6
    assert summary(*words, "--out", "two.jsonl") == values
    assert Path("one.jsonl").read_bytes() == Path("two.jsonl").read_bytes()
    assert summary("score", TASK, "one.jsonl")["reward"] == values["reward"]
    code, output = run("sample", "run")
    assert code == 2
    assert "was not trained on a task" in output
    code, output = run(*words[:8], "--set", "temprature=2")
    assert code == 2
    assert "temperature" in output
    code, output = run(*words[:4])
    assert code == 2
    assert "no held-out examples" in output
