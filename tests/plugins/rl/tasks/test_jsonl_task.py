"""Tasks in JSONL files."""

import json

import pytest

from axlearn_core.config import check
from axlearn_core.errors import ConfigError, InputError
from axlearn_plugins_rl.rollout_contracts import Example
from axlearn_plugins_rl.tasks.jsonl_task import JsonlTask


@pytest.fixture
def write(tmp_path):
    def write_rows(*rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return str(path)

    return write_rows


def test_rows_are_examples(write):
    tool, message = {"type": "function", "function": {"name": "f"}}, {"role": "user", "content": "2 + 2?"}
    path = write(
        {"id": "one", "prompt": "1 + 1 = ", "answer": "2"},
        {"messages": [message], "answer": {"value": 4}, "tools": [tool]},
        {"prompt": "?"},
    )
    examples = JsonlTask.Config(paths=path).build().examples("train")
    assert [*examples] == [
        Example(id="one", prompt="1 + 1 = ", answer="2"),
        Example(id=f"{path}, line 2", prompt=(message,), answer={"value": 4}, tools=(tool,)),
        Example(id=f"{path}, line 3", prompt="?"),
    ]
    assert examples[2] == [*examples][2]


def test_rows_of_other_datasets_can_be_read(write):
    path = write(
        {"question": "How many?", "answer": "It is 2 + 2 = 4.\n#### 4"},
        {"question": "And?", "answer": "#### 1\n#### 2"},
    )
    config = JsonlTask.Config(paths=path, prompt_field="question", answer_pattern="#### (.*)")
    assert [(e.prompt, e.answer) for e in config.build().examples("train")] == [("How many?", "4"), ("And?", "2")]


def test_a_share_or_other_files_are_held_out(write):
    rows = [{"prompt": f"{i % 40} = ", "answer": str(i % 40)} for i in range(80)]
    task = JsonlTask.Config(paths=write(*rows), validation_fraction=0.3).build()
    train, held_out = ({e.prompt for e in task.examples(split)} for split in ("train", "held_out"))
    assert len(train) + len(held_out) == 40
    assert not train & held_out
    assert held_out
    other = write({"prompt": "other"}, name="other.jsonl")
    task = JsonlTask.Config(paths=write(*rows), validation_paths=other).build()
    assert (len(task.examples("train")), [e.prompt for e in task.examples("held_out")]) == (80, ["other"])
    assert not JsonlTask.Config(paths=other).build().examples("held_out")


def test_the_description_changes_with_the_files(write):
    facts = JsonlTask.Config(paths=write({"prompt": "a"})).build().describe()
    assert facts == JsonlTask.Config(paths=write({"prompt": "a"})).build().describe()
    assert facts != JsonlTask.Config(paths=write({"prompt": "b"})).build().describe()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"promt": "a"},
            r"line 2: has no field 'prompt'; its fields: promt\n    nearest: promt[^$]*fix: set prompt_field",
        ),
        ({"prompt": 3}, r"line 2: prompt is a int"),
        ({"prompt": ""}, r"line 2: the prompt is empty"),
        ({"prompt": "\ud800"}, r"line 2: has text that is not valid Unicode"),
        ({"messages": "hi"}, r"line 2: the field 'messages' is not a list of messages"),
        ({"messages": [{"role": "user"}]}, r"line 2: messages\[0\] has no text"),
        ({"prompt": "a", "tools": "calculator"}, r"line 2: tools is not a list of objects"),
        (["prompt"], r"line 2: is a list"),
    ],
)
def test_invalid_rows_are_located(write, row, message):
    with pytest.raises(InputError, match=message):
        JsonlTask.Config(paths=write({"prompt": "a"}, row)).build()


def test_answers_that_do_not_match_are_located(write):
    path = write({"prompt": "a", "answer": "#### 1"}, {"prompt": "b", "answer": "2"})
    with pytest.raises(InputError, match=r"line 2: answer_pattern does not match the field 'answer'\n    got: '2'"):
        JsonlTask.Config(paths=path, answer_pattern="#### (.*)").build()


def test_settings_are_checked(write):
    with pytest.raises(ConfigError, match=r"answer_pattern: is not a regular expression"):
        check(JsonlTask.Config(paths="a", answer_pattern="("))
    with pytest.raises(InputError, match="has no examples for training"):
        JsonlTask.Config(validation_paths=write({"prompt": "a"})).build()
