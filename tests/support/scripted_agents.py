"""Agents that call a scripted policy, and checks of their rollouts."""

import asyncio

import numpy as np

from axlearn_plugins_rl.agents import AgentSource
from axlearn_plugins_rl.rollout_contracts import Example
from axlearn_plugins_rl.testing.scripted_policy import ScriptedPolicy, logprob_of
from axlearn_plugins_transformer.text.processor import TextProcessor
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer
from support.scripted_models import HERMES_WITH_ENDS, hermes_template

EXAMPLE = Example(id="rome", prompt="Weather in Rome?", answer="sunny")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def number(context, seed):
    return f"answer {context.count('Assistant')} of {seed % 1000}"


def use_tools(context, seed):
    return "It is sunny." if "<|tool|>" in context else f"<think>Hm.</think>One moment.{CALL}"


def hermes(folder, script=use_tools, **options):
    template = hermes_template(folder, HERMES_WITH_ENDS).config
    text = TextProcessor.Config(template=template).build(tokenizer=ByteTokenizer.Config().build())
    return ScriptedPolicy(script, text, **options)


def collect(solve, policy, seeds=(1, 2), **settings):
    class Source(AgentSource):
        async def solve(self, client, example):
            return await solve(client, example)

    return asyncio.run(AgentSource.collect(Source(AgentSource.Config(**settings)), EXAMPLE, policy, seeds))


async def ask(client, *messages, **fields):
    response = await client.chat.completions.create(model="policy", messages=list(messages), **fields)
    return response.choices[0]


def user(text):
    return {"role": "user", "content": text}


def text_of(segments):
    return bytes(35 if t == 256 else t for s in segments for t in s.tokens).decode()


def check_tokens(rollout):
    for trajectory in rollout.trajectories:
        context = []
        for segment in trajectory:
            for i, token in enumerate(map(int, segment.tokens)):
                if segment.drawn:
                    assert segment.logprobs[i] == np.float32(logprob_of(context, token))
                context.append(token)
