"""Agents: their calls as trajectories, what they may ask for, failures, and equal attempts for equal seeds."""

import asyncio
import json
import sys

import openai
import pytest

from axlearn_core.errors import RequestError
from axlearn_plugins_rl.testing.scripted_policy import ScriptedPolicy
from support.scripted_agents import ask, check_tokens, collect, hermes, number, text_of, user
from support.scripted_models import WEATHER


async def two_turns(client, example):
    first = user(example.prompt)
    choice = await ask(client, first)
    choice = await ask(client, first, choice.message, user("Are you sure?"))
    return float("2" in choice.message.content)


def test_calls_that_continue_an_answer_continue_its_trajectory():
    policy = ScriptedPolicy(number)
    rollouts = collect(two_turns, policy)
    for rollout in rollouts:
        (trajectory,) = rollout.trajectories
        assert [s.drawn for s in trajectory] == [False, True, False, True]
        assert rollout.metrics == {"turns": 2, "forks": 0, "environment_reward": 1.0}
        assert [m["role"] for m in rollout.messages] == ["user", "assistant"] * 2
        assert (rollout.finish, rollout.text) == ("stop", rollout.messages[-1]["content"])
        assert text_of(trajectory).startswith("User:\nWeather in Rome?\n\nAssistant:\nanswer 1 of ")
        check_tokens(rollout)
    assert len({seed for _, seed in policy.contexts}) == 4


def test_other_calls_start_trajectories():
    async def solve(client, example):
        await ask(client, user("one"))
        await ask(client, user("two"))

    (rollout,) = collect(solve, ScriptedPolicy(number), seeds=[5])
    assert [text_of(t[:1]) for t in rollout.trajectories] == [
        f"User:\n{word}\n\nAssistant:\n" for word in ("one", "two")
    ]
    assert rollout.metrics == {"turns": 2, "forks": 1}


async def use_weather(client, example):
    messages = [user(example.prompt)]
    while True:
        choice = await ask(client, *messages, tools=[WEATHER])
        messages.append(choice.message)
        if not choice.message.tool_calls:
            return 1.0
        assert choice.finish_reason == "tool_calls"
        assert choice.message.reasoning_content == "Hm."
        for call in choice.message.tool_calls:
            assert json.loads(call.function.arguments) == {"city": "Rome"}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})


def test_tools_are_called_as_on_the_server(tmp_path):
    first, second = (collect(use_weather, hermes(tmp_path), seeds=[1])[0] for _ in range(2))
    assert first.error is None
    assert first.messages == second.messages  # with the ids of the calls
    assert first.text == "It is sunny."
    assert first.metrics == {"turns": 2, "forks": 0, "environment_reward": 1.0}
    check_tokens(first)


def test_parallel_calls_have_seeds_that_do_not_depend_on_their_order():
    def run(order):
        async def solve(client, example):
            async def later(position, word):
                await asyncio.sleep(0.01 * position)
                return await ask(client, user(word))

            await asyncio.gather(*(later(position, word) for position, word in enumerate(order)))

        policy = ScriptedPolicy(lambda context, seed: str(seed))
        (rollout,) = collect(solve, policy, seeds=[7])
        return {text_of(trajectory) for trajectory in rollout.trajectories}

    assert run("abc") == run("cab")
    assert len(run("aaa")) == 3


def test_limits_and_stops_of_a_call_reach_the_policy():
    async def solve(client, example):
        choice = await ask(client, user("one"), max_tokens=4)
        assert (choice.message.content, choice.finish_reason) == ("answ", "length")
        choice = await ask(client, user("two"), stop=["of"])
        assert (choice.message.content, choice.finish_reason) == ("answer 1 ", "stop")
        await ask(client, user("two"), choice.message, user("more"), max_tokens=10_000)

    (rollout,) = collect(solve, ScriptedPolicy(number, max_context=200), seeds=[1])
    assert rollout.error is None
    one, two = rollout.trajectories
    assert text_of(one[1:]) == "answ"
    assert text_of(two[1:3]).startswith("answer 1 of#\n\nUser:\nmore")
    check_tokens(rollout)


def test_a_full_context_ends_the_attempt():
    async def solve(client, example):
        messages = [user("one")]
        while True:
            choice = await ask(client, *messages)
            messages += [choice.message, user("more")]

    (rollout,) = collect(solve, ScriptedPolicy(number, max_context=100), seeds=[1])
    assert (rollout.finish, rollout.error) == ("length", None)
    assert sum(len(s.tokens) for s in rollout.trajectories[0]) <= 100


async def fail(client, example):
    await ask(client, user("one"))
    raise KeyError("city")


async def hang(client, example):
    await ask(client, user("one"))
    await asyncio.sleep(60)


async def return_text(client, example):
    await ask(client, user("one"))
    return "good"


@pytest.mark.parametrize(
    ("solve", "error"),
    [
        (fail, "solve: KeyError: 'city' (test_agent_source.py:"),
        (hang, "solve took longer than 0.3 s"),
        (return_text, "solve returned 'good', but a reward is a finite number"),
    ],
)
def test_a_failure_of_the_agent_is_a_rollout_with_an_error(solve, error):
    for rollout in collect(solve, ScriptedPolicy(number), time_limit=0.3):
        assert rollout.finish == "error"
        assert error in rollout.error
        assert rollout.num_drawn > 0
        assert "environment_reward" not in rollout.metrics


def test_a_failure_of_the_policy_is_raised_even_if_the_agent_catches_it():
    async def solve(client, example):
        try:
            await ask(client, user("one"))
        except openai.APIError:
            return 0.0

    def break_down(context, seed):
        raise RuntimeError("the engine failed")

    with pytest.raises(RuntimeError, match="the engine failed"):
        collect(solve, ScriptedPolicy(break_down))


def test_without_openai_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(RequestError, match=r"axlearn-plugins-rl\[agents\]"):
        collect(two_turns, ScriptedPolicy(number))
