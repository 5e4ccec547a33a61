"""Evaluation of a run on files of several kinds, and errors in files."""

import json
import math
from types import SimpleNamespace

import jax
import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner

import axlearn_core as ax
from axlearn_core.cli.main import cli
from axlearn_core.compose import compose
from axlearn_core.errors import InputError
from axlearn_plugins_tools.evaluation.data import Question, read
from axlearn_plugins_tools.evaluation.evaluator import FileEvaluator

QUESTION = {"prompt": "2 + 2 =", "choices": ["3", "4"], "answer": 1}
TALK = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]}


def write(path, *rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), "utf-8")
    return str(path)


def evaluated(*words, code=0):
    result = CliRunner().invoke(cli, ["evaluate", *map(str, words)])
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


SETTINGS = {
    "model.vocab_size": 257,
    "model.decoder.num_layers": 1,
    "model.decoder.hidden_dim": 32,
    "model.decoder.layer.attention.num_heads": 2,
    "model.decoder.layer.feed_forward.hidden_dim": 32,
    "learner.optimizer": {"type": "adamw", "learning_rate": 0.01},
    "input.tokenizer": {"type": "byte-tokenizer"},
    "input.sequence_length": 32,
    "trackers": [{"type": "jsonl"}],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has saved what it began with."""
    folder = tmp_path_factory.mktemp("evaluation")
    resolved = ax.resolve("quickstart", set=SETTINGS)
    program = compose(resolved.config, jax.devices()[:1])
    checkpointer = resolved.config.checkpointer.build(directory=folder / "checkpoints")
    (folder / "config.yaml").write_text(resolved.to_yaml(), "utf-8")
    checkpointer.save(1, program.init(0), extra={}, metrics={})
    checkpointer.close()
    return folder


@pytest.mark.slow
def test_each_file_is_scored_by_what_is_in_it(run, tmp_path):
    text = write(tmp_path / "t.txt", "The end of a text is not predicted.")
    rows = write(tmp_path / "t.jsonl", *[{"body": "Twice the same."}] * 2)
    chat, questions = write(tmp_path / "c.jsonl", TALK), write(tmp_path / "q.jsonl", QUESTION, QUESTION)
    data = [w for name in (text, rows, chat, questions) for w in ("--data", name)]
    result = evaluated(run, *data, "--text-field", "body", "--json")
    results = {r["name"]: r for r in json.loads(result.stdout)}
    assert [r["kind"] for r in results.values()] == ["text", "text", "chat", "choices"]
    assert results[text]["bytes"] == results[text]["tokens"] == 36
    assert results[rows]["rows"] == 2
    assert math.isclose(results[rows]["perplexity"], math.exp(results[rows]["loss"]))
    assert results[chat]["tokens"] == 4
    assert results[questions]["accuracy"] in (0.0, 1.0)

    loaded = ax.load(run)
    session = SimpleNamespace(program=loaded.program, input=loaded.config.input.build(), model=lambda: loaded.model)
    evaluator = FileEvaluator.Config(data=chat).build(name="talk", input=session.input)
    assert evaluator.run(session)["talk_loss"] == pytest.approx(results[chat]["loss"])

    table = evaluated(run, "--data", questions, "--limit", 1).stdout
    assert "choices  1     accuracy " in table
    short = json.loads(evaluated(run, "--data", text, "--max-length", 8, "--stride", 2, "--json").stdout)[0]
    assert short["tokens"] == 36
    assert short["loss"] != results[text]["loss"]


def test_what_is_wrong_ends_with_exit_code_2(run, tmp_path):
    bad = write(tmp_path / "q.jsonl", QUESTION, {k: v for k, v in QUESTION.items() if k != "answer"})
    error_text = evaluated(run, "--data", bad, code=2).stderr
    assert "q.jsonl, line 2: the question has no 'answer'; its fields: prompt, choices" in error_text
    assert "is not a run directory" in evaluated(tmp_path, "--data", write(tmp_path / "a.txt", "a"), code=2).stderr
    assert "no data file matches" in evaluated(run, "--data", tmp_path / "none.txt", code=2).stderr
    evaluated(run, code=2)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {**QUESTION, "answer": 2},
            r"the 'answer' is not one of the choices\n    got: 2\n    expected: an index from 0 to 1",
        ),
        ({**QUESTION, "answer": True}, "got: True"),
        ({**QUESTION, "answer": "5"}, "got: '5'"),
        ({**QUESTION, "choices": ["4"]}, r"needs 'choices'\n    got: \['4'\]\n    expected: a list of two or more"),
        ({"choices": ["3", "4"], "answer": 0}, "needs text in 'prompt'"),
        ({"txt": "a"}, r"its fields: txt\n    did you mean: text\?"),
        (TALK, "line 2: the row has messages, but earlier rows have choices"),
        ({"messages": [{"role": "human", "content": "?"}]}, "has the role 'human'"),
        ("{", "line 2: is not JSON"),
    ],
)
def test_bad_rows(row, reason, tmp_path):
    path = write(tmp_path / "rows.jsonl", QUESTION, row)
    with pytest.raises(InputError, match=reason):
        read(path)
    assert len(read(path, limit=1).items) == 1


def test_rows_that_are_right(tmp_path):
    (question,) = read(write(tmp_path / "q.jsonl", {**QUESTION, "answer": "4", "delimiter": "\n"})).items
    assert question == Question("2 + 2 =", ("3", "4"), 1, "\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"]}), tmp_path / "t.parquet")
    assert read(str(tmp_path / "t.parquet")).items == ("one", "two")
    for i in range(2):
        write(tmp_path / f"{i}.txt", "x" * 40_000)
    assert [len(t) for t in read(str(tmp_path / "*.txt")).items] == [40_001, 40_001]


@pytest.mark.slow
def test_accuracy_rises_while_a_run_learns(tmp_path):
    """The whole way: training on conversations, evaluated on questions, on the mesh that the run is on."""
    sums = [(a, b) for a in range(4) for b in range(4)]
    talks = [{"messages": [{"role": "user", "content": f"{a} and {b}?"}, {"role": "assistant", "content": str(a + b)}]}
             for a, b in sums]  # fmt: skip
    questions_rows = [{"prompt": f"User:\n{a} and {b}?\n\nAssistant:\n", "choices": [str(a + b), str(a + b + 1), "no"],
              "answer": 0, "delimiter": ""} for a, b in sums]  # fmt: skip
    data, questions = write(tmp_path / "talks.jsonl", *talks), write(tmp_path / "asked.jsonl", *questions_rows)
    evaluators = {"asked": {"type": "file-evaluator", "data": questions}}
    more = {"model.vocab_size": 264, "input.batch_size": 8, "input.sequence_length": 128, "evaluators": evaluators}
    ax.train(
        "quickstart", with_={"chat": {"data": data}}, set={**SETTINGS, **more}, steps=120, run_dir=tmp_path / "run"
    )
    last = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()][-1]
    result = json.loads(evaluated(tmp_path / "run", "--data", questions, "--data", data, "--json").stdout)
    assert last["asked_accuracy"] == result[0]["accuracy"] > 0.8
    assert result[1]["perplexity"] < 2
