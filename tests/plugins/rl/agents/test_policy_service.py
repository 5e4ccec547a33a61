"""Agents send requests to the policy. It answers and records them, or refuses them."""

import pytest

from axlearn_plugins_rl.testing.scripted_policy import ScriptedPolicy
from support.scripted_agents import ask, check_tokens, collect, hermes, number, text_of, user
from support.scripted_models import WEATHER


def test_streams_and_several_choices_are_recorded():
    async def solve(client, example):
        stream = await client.chat.completions.create(model="policy", messages=[user("one")], stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(pieces).startswith("answer 1 of")
        response = await client.chat.completions.create(model="policy", messages=[user("two")], n=3, logprobs=True)
        assert len({choice.message.content for choice in response.choices}) == 3
        assert all(choice.logprobs.content for choice in response.choices)
        response = await client.responses.create(model="policy", input="three", store=False)
        assert response.output_text.startswith("answer 1 of")

    (rollout,) = collect(solve, ScriptedPolicy(number), seeds=[5])
    assert rollout.error is None
    assert [text_of(t[:1])[6:9] for t in rollout.trajectories] == ["one", "two", "two", "two", "thr"]
    check_tokens(rollout)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"temperature": 0.2}, "temperature: agents are trained on what the policy samples"),
        ({"top_p": 0.5}, "top_p"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"repetition_penalty": 1.5}}, "repetition_penalty"),
        ({"extra_body": {"add_generation_prompt": False}}, "cannot continue a message"),
        ({"model": "other"}, "unknown model 'other'"),
    ],
)
def test_requests_for_another_distribution_are_refused(fields, error, tmp_path):
    async def solve(client, example):
        await client.chat.completions.create(**{"model": "policy", "messages": [user("one")], **fields})

    (rollout,) = collect(solve, hermes(tmp_path), seeds=[1])
    assert rollout.finish == "error"
    assert error in rollout.error
    assert rollout.trajectories == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "n": 1, "seed": 3},
        {"response_format": {"type": "text"}, "extra_body": {"top_k": -1, "repetition_penalty": 1.0}},
    ],
)
def test_requests_that_name_the_distribution_are_answered(fields):
    async def solve(client, example):
        await ask(client, user("one"), **fields)

    assert collect(solve, ScriptedPolicy(number), seeds=[1])[0].error is None
