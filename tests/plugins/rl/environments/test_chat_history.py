"""The conversation as tokens: nothing that was drawn is encoded again, and trajectories are what the policy read."""

import random

import numpy as np
import pytest

from axlearn_plugins_rl.environments.chat_history import ChatHistory
from axlearn_plugins_rl.rollout_contracts import Completion, Segment
from axlearn_plugins_transformer.text.chat_template import ChatTemplate
from axlearn_plugins_transformer.text.processor import TextProcessor
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer
from support.scripted_models import HERMES, HERMES_WITH_ENDS, WEATHER

EOS = 256
USER = {"role": "user", "content": "Weather in Rome?"}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'}}
DROPS_REASONING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Leaves the reasoning of earlier turns out, as Qwen 3 does."""
EMPTY_THINK = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
"""Shows an empty reasoning only in the last answer, as Qwen 3 does."""


def build_text(source=None, folder=None):
    tokenizer = ByteTokenizer.Config().build()
    if source is None:
        return TextProcessor.Config().build(tokenizer=tokenizer)
    (folder / "template.jinja").write_text(source)
    template = ChatTemplate.Config(path=str(folder / "template.jinja"))
    return TextProcessor.Config(template=template).build(tokenizer=tokenizer)


def completion(written, *, ends=True):
    tokens = [*written.encode(), *([EOS] if ends else [])]
    values = -np.arange(1, len(tokens) + 1, dtype=np.float32)
    segment = Segment(tokens=np.array(tokens, np.int32), drawn=True, logprobs=values, model_logprobs=values, version=3)
    return Completion(segment=segment, text=written, finish="stop")


def spell(segments):
    tokens = [int(t) for segment in segments for t in segment.tokens]
    return b"".join(b"#" if t == EOS else bytes([t]) for t in tokens).decode()


def answer(history, turn, content, written=None, **fields):
    message = {"role": "assistant", "content": content, **fields}
    history.add(turn, completion(content if written is None else written), message)
    return message


def test_a_turn_continues_the_tokens_of_the_turns_before_it():
    history = ChatHistory(build_text())
    first = history.open([USER])
    message = answer(history, first, "12")
    second = history.open([USER, message, {"role": "user", "content": "And in Oslo?"}])
    answer(history, second, "-3")
    (trajectory,) = history.trajectories
    assert [segment.drawn for segment in trajectory] == [False, True, False, True]
    assert spell(trajectory) == ("User:\nWeather in Rome?\n\nAssistant:\n12#\n\nUser:\nAnd in Oslo?\n\nAssistant:\n-3#")
    assert second.tokens == tuple(t for segment in trajectory[:3] for t in segment.tokens)
    assert trajectory[1].version == 3
    np.testing.assert_array_equal(trajectory[1].logprobs, [-1, -2, -3])


def test_tokens_that_were_drawn_are_not_encoded_again(monkeypatch):
    text = build_text()
    history, encoded = ChatHistory(text), []
    encode = text.encode_rendered
    monkeypatch.setattr(text, "encode_rendered", lambda r: encoded.append(r.text) or encode(r))
    message = answer(history, history.open([USER]), "secret")
    history.open([USER, message, {"role": "user", "content": "More"}])
    assert len(encoded) == 2
    assert "secret" not in "".join(encoded)


@pytest.mark.parametrize("written", ['<call>{"city":   "Rome"}', "", "get_weather", "<tool_call>\n{}"])
def test_an_answer_that_the_template_writes_differently_keeps_its_tokens(written, tmp_path):
    history = ChatHistory(build_text(HERMES_WITH_ENDS, tmp_path))
    message = answer(history, history.open([USER], [WEATHER]), None, written, tool_calls=[{"id": "a", **CALL}])
    tool = {"role": "tool", "tool_call_id": "a", "content": "sunny"}
    turn = history.open([USER, message, tool], [WEATHER])
    assert turn.previous is not None
    assert spell(turn.segments[1:]) == f"{written}#\n<|tool|>sunny\n<|assistant|>"


def test_reasoning_that_the_template_drops_starts_a_new_trajectory(tmp_path):
    history = ChatHistory(build_text(DROPS_REASONING, tmp_path))
    written = "<think>Hm.</think>12"
    message = answer(history, history.open([USER]), "12", written, reasoning_content="Hm.")
    turn = history.open([USER, message, {"role": "user", "content": "Oslo?"}])
    assert turn.previous is None
    answer(history, turn, "-3")
    one, two = history.trajectories
    assert spell(one) == f"<|user|>Weather in Rome?\n<|assistant|>{written}#"
    assert spell(two) == "<|user|>Weather in Rome?\n<|assistant|>12#\n<|user|>Oslo?\n<|assistant|>-3#"
    assert [segment.drawn for segment in two] == [False, True]  # "12" was drawn in another context


def test_an_empty_reasoning_block_that_the_template_drops_does_not_fork(tmp_path):
    history = ChatHistory(build_text(EMPTY_THINK, tmp_path))
    message = answer(history, history.open([USER]), "12")
    turn = history.open([USER, message, {"role": "user", "content": "Oslo?"}])
    assert spell(turn.segments).endswith("</think>\n\n12#\n<|user|>Oslo?\n<|assistant|><think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda m: m, True),
        (lambda m: [{**m[0], "content": "Other"}, *m[1:]], False),
        (lambda m: [m[0], {**m[1], "content": "edited"}, *m[2:]], False),
        (lambda m: [{"role": "system", "content": "Be brief."}, *m], False),
        (lambda m: [m[0], {**m[1], "refusal": None}, *m[2:]], True),
        (lambda m: m[1:], False),
    ],
)
def test_only_a_conversation_that_extends_an_answer_continues_it(edit, expected):
    history = ChatHistory(build_text())
    message = answer(history, history.open([USER]), "12")
    turn = history.open(edit([USER, message, {"role": "user", "content": "More"}]))
    assert (turn.previous is not None) is expected


def test_other_tools_or_options_start_a_new_trajectory(tmp_path):
    history = ChatHistory(build_text(HERMES, tmp_path))
    message = answer(history, history.open([USER], [WEATHER]), "12")
    messages = [USER, message, {"role": "user", "content": "More"}]
    assert history.open(messages).previous is None
    assert history.open(messages, [WEATHER], {"enable_thinking": False}).previous is None


def test_two_continuations_of_an_answer_train_its_tokens_once():
    history = ChatHistory(build_text())
    message = answer(history, history.open([USER]), "12")
    turns = [history.open([USER, message, {"role": "user", "content": f"More {i}"}]) for i in range(3)]
    for turn in reversed(turns):  # the order of the answers does not matter
        answer(history, turn, "ok")
    rows = history.trajectories
    assert [spell(row).count("12#") for row in rows] == [1, 1, 1]
    assert [[spell([s]) for s in row if s.drawn] for row in rows] == [["12#", "ok#"], ["ok#"], ["ok#"]]
    assert all(f"More {i}" in spell(row) for i, row in enumerate(rows))


def test_a_turn_without_an_answer_leaves_the_earlier_trajectory():
    history = ChatHistory(build_text())
    message = answer(history, history.open([USER]), "12")
    history.open([USER, message, {"role": "user", "content": "More"}])
    assert [spell(row)[-3:] for row in history.trajectories] == ["12#"]


@pytest.mark.parametrize("ends", [True, False])
def test_an_answer_that_a_stop_string_ended_is_closed_by_the_template(ends):
    history = ChatHistory(build_text())
    message = {"role": "assistant", "content": "look it up"}
    history.add(history.open([USER]), completion("look it up</search>", ends=ends), message)
    turn = history.open([USER, message, {"role": "user", "content": "found"}])
    assert spell(turn.segments[1:]) == "look it up</search>#\n\nUser:\nfound\n\nAssistant:\n"
    assert [len(s.tokens) for s in turn.segments][1] == len("look it up</search>") + ends


@pytest.mark.parametrize("seed", range(5))
def test_random_conversations_are_what_the_policy_read(seed):
    """Each context is the beginning of its trajectory, and each drawn token is trained on exactly once."""
    rng = random.Random(seed)
    history, conversations, drawn = ChatHistory(build_text()), [[USER]], []
    for number in range(20):
        messages = rng.choice(conversations)
        turn = history.open(messages)
        written = f"answer {number}"
        message = answer(history, turn, written)
        drawn.append(f"{written}#")
        conversations.append([*messages, message, {"role": "user", "content": f"more {number}"}])
        rows = [[int(t) for segment in row for t in segment.tokens] for row in history.trajectories]
        whole = [*turn.tokens, *written.encode(), EOS]
        assert any(row[: len(whole)] == whole for row in rows)
    trained = [spell([segment]) for row in history.trajectories for segment in row if segment.drawn]
    assert sorted(trained) == sorted(drawn)
