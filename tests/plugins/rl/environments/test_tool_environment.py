"""Tools: their descriptions, calls, errors and limits."""

import asyncio
import json
import time
from typing import Literal

import pytest

from axlearn_core.errors import RequestError
from axlearn_plugins_rl.environments import ToolEnvironment
from axlearn_plugins_rl.environments.multi_turn import MultiTurn
from axlearn_plugins_rl.rollout_contracts import Example
from axlearn_plugins_rl.testing.scripted_policy import ScriptedPolicy
from axlearn_plugins_transformer.text.processor import TextProcessor
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer
from support.scripted_models import HERMES_WITH_ENDS, hermes_template

EXAMPLE = Example(id="x", prompt="6*7?")


def multiply(a: int, b: int = 1) -> int:
    """Multiply two integers."""
    return a * b


async def look_up(city: str, unit: Literal["C", "F"] = "C") -> dict:
    """Return the weather."""
    await asyncio.sleep(0)
    return {"city": city, "unit": unit}


def divide(a: int, b: int) -> float:
    return a / b


def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "late"


class Tools(ToolEnvironment):
    functions = (multiply, look_up, divide, sleep)


def call(name, arguments, number=0):
    return {"id": f"c{number}", "function": {"name": name, "arguments": arguments}}


def reply(*calls, **settings):
    async def run():
        episode = await Tools(Tools.Config(**settings)).start(EXAMPLE, seed=0)
        try:
            answer = await episode.reply({"role": "assistant", "content": "", "tool_calls": list(calls)})
            return answer, episode.metrics
        finally:
            await episode.close()

    return asyncio.run(run())


def test_descriptions_come_from_signatures():
    episode = asyncio.run(Tools(Tools.Config()).start(EXAMPLE, seed=0))
    functions = {tool["function"]["name"]: tool["function"] for tool in episode.tools}
    assert functions["multiply"] == {
        "name": "multiply",
        "description": "Multiply two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}},
            "required": ["a"],
            "additionalProperties": False,
        },
    }
    assert functions["look_up"]["parameters"]["properties"]["unit"]["enum"] == ["C", "F"]


def test_calls_are_answered_in_order():
    answer, metrics = reply(
        call("multiply", '{"a": 6, "b": 7}', 1),
        call("look_up", '{"city": "Rome"}', 2),
        call("multiply", '{"a": 3}', 3),
    )
    assert [(m["role"], m["tool_call_id"], m["content"]) for m in answer.messages] == [
        ("tool", "c1", "42"),
        ("tool", "c2", '{"city": "Rome", "unit": "C"}'),
        ("tool", "c3", "3"),
    ]
    assert not answer.done
    assert metrics == {"tool_calls": 3, "tool_errors": 0}


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("multiply", '{"b": 7}', "a: Field required"),
        ("multiply", '{"a": "six"}', "a: Input should be a valid integer"),
        ("multiply", '{"a": 1, "c": 2}', "c: Extra inputs are not permitted"),
        ("multiply", "{", "Invalid JSON"),
        ("multiply", "[1]", "arguments: Input should be an object"),
        ("look_up", '{"city": "Rome", "unit": "K"}', "unit: Input should be 'C' or 'F'"),
        ("divide", '{"a": 1, "b": 0}', "divide: ZeroDivisionError: division by zero"),
        ("sleep", '{"seconds": 0.5}', "sleep took longer than 0.05 s"),
        ("add", "{}", "unknown tool 'add'; the tools are multiply, look_up"),
    ],
)
def test_calls_that_fail_are_answered_with_an_error(name, arguments, error):
    answer, metrics = reply(call(name, arguments), call("multiply", '{"a": 2}'), call_limit=0.05)
    bad, good = answer.messages
    assert bad["content"].startswith("error: ")
    assert error in bad["content"]
    assert good["content"] == "2"
    assert metrics == {"tool_calls": 2, "tool_errors": 1}


def test_long_results_are_cut():
    answer, _ = reply(call("look_up", json.dumps({"city": "x" * 100})), max_length=20)
    assert answer.messages[0]["content"] == '{"city": "xxxxxxxxxx... (125 characters)'


def test_an_answer_without_calls_ends_the_episode():
    answer, _ = reply()
    assert (answer.done, answer.messages) == (True, ())


def test_calls_that_hang_do_not_delay_other_calls():
    began = time.monotonic()

    async def run():
        environment = Tools(Tools.Config(call_limit=0.1))
        episodes = [await environment.start(EXAMPLE, seed=i) for i in range(40)]
        calls = {"role": "assistant", "tool_calls": [call("sleep", '{"seconds": 1.5}')]}
        return await asyncio.gather(*(episode.reply(calls) for episode in episodes))

    assert all("took longer" in answer.messages[0]["content"] for answer in asyncio.run(run()))
    assert time.monotonic() - began < 1.4


@pytest.mark.parametrize(
    ("functions", "error"),
    [
        ((), "Tools has no functions"),
        ((lambda *numbers: sum(numbers),), r"the parameter \*numbers"),
        ((lambda number: number,), "the parameter number of the tool <lambda> has no type"),
    ],
)
def test_functions_that_cannot_be_tools_are_refused(functions, error, monkeypatch):
    monkeypatch.setattr(Tools, "functions", functions)
    with pytest.raises(RequestError, match=error):
        asyncio.run(Tools(Tools.Config()).start(EXAMPLE, seed=0))


def test_functions_of_an_episode_can_read_its_example():
    class Search(ToolEnvironment):
        def bind(self, example, seed):
            def search(word: str) -> str:
                return f"{example.answer} {seed}"

            return (search,)

    async def run():
        episode = await Search(Search.Config()).start(Example(id="x", prompt="?", answer="text"), seed=3)
        return await episode.reply({"role": "assistant", "tool_calls": [call("search", '{"word": "a"}')]})

    assert asyncio.run(run()).messages[0]["content"] == "text 3"


def test_a_policy_uses_the_tools_of_an_episode(tmp_path):
    def script(context, seed):
        if "<|tool|>42" in context:
            return "It is 42."
        assert context.startswith("Tools: ")
        return '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'

    text = TextProcessor.Config(template=hermes_template(tmp_path, HERMES_WITH_ENDS).config).build(
        tokenizer=ByteTokenizer.Config().build()
    )
    source = MultiTurn(MultiTurn.Config(environment=Tools.Config()))
    (rollout,) = asyncio.run(source.collect(EXAMPLE, ScriptedPolicy(script, text), [1]))
    assert (rollout.text, rollout.finish, rollout.error) == ("It is 42.", "stop", None)
    assert rollout.metrics == {"turns": 2, "forks": 0, "tool_calls": 1, "tool_errors": 0}
