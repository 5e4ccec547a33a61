"""Rollouts in turns: the tokens, limits, failures of the environment and of the policy, and closed episodes."""

import asyncio
import importlib
import json

import numpy as np
import pytest

from axlearn_core.config import Configurable, node
from axlearn_core.errors import ConfigError, InputError
from axlearn_plugins_rl.environments.multi_turn import MultiTurn
from axlearn_plugins_rl.environments.rollout_formats import RolloutFormats
from axlearn_plugins_rl.rollout_contracts import Example, Reply
from axlearn_plugins_rl.testing.scripted_policy import ScriptedPolicy, logprob_of
from axlearn_plugins_transformer.text.chat_template import ChatTemplate
from axlearn_plugins_transformer.text.processor import TextProcessor
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer
from support.paths import ROOT
from support.scripted_models import HERMES_WITH_ENDS, WEATHER, hermes_template

EXAMPLE = Example(id="sum", prompt="2+3?", answer=5)


class Counting(Configurable):
    """Asks again until the answer is right. `plan` maps a turn to a function that returns its reply."""

    @node
    class Config(Configurable.Config["Counting"]):
        turns: int = 3

    def __init__(self, cfg):
        self.turns, self.episodes, self.plan = cfg.turns, [], {}

    async def start(self, example, *, seed):
        if "start" in self.plan:
            await self.plan["start"]()
        episode = CountingEpisode(self, seed)
        self.episodes.append(episode)
        return episode


class CountingEpisode:
    def __init__(self, game, seed):
        self.game, self.seed, self.replies, self.closed = game, seed, 0, 0
        self.metrics = {}

    async def reply(self, message):
        self.replies += 1
        self.metrics = {"replies": self.replies}
        if self.replies in self.game.plan:
            return await self.game.plan[self.replies](message)
        if self.replies == self.game.turns:
            return Reply(done=True, reward=1.0)
        return Reply(messages=({"role": "user", "content": f"Again {self.replies}."},), reward=0.25)

    async def close(self):
        self.closed += 1
        if "close" in self.game.plan:
            await self.game.plan["close"]()


def collect(source, policy, seeds=(1, 2, 3), example=EXAMPLE):
    return asyncio.run(source.collect(example, policy, seeds))


def build(turns=3, plan=None, **settings):
    source = MultiTurn.Config(environment=Counting.Config(turns=turns), **settings).build()
    source.environment.plan = plan or {}
    return source


def number(context, seed):
    return f"answer {context.count('Assistant')} of {seed % 1000}"


def text_of(segments):
    return bytes(35 if t == 256 else t for s in segments for t in s.tokens).decode()


def check_tokens(rollout):
    """Check that each drawn token has the log-probability that the policy gave it after exactly the tokens before it."""
    for trajectory in rollout.trajectories:
        context = []
        for segment in trajectory:
            for i, token in enumerate(map(int, segment.tokens)):
                if segment.drawn:
                    assert segment.logprobs[i] == np.float32(logprob_of(context, token))
                context.append(token)


def test_rollouts_take_turns():
    source, policy = build(), ScriptedPolicy(number)
    rollouts = collect(source, policy)
    assert [rollout.seed for rollout in rollouts] == [1, 2, 3]
    for rollout in rollouts:
        (trajectory,) = rollout.trajectories
        assert [s.drawn for s in trajectory] == [False, True] * 3
        assert (rollout.finish, rollout.error) == ("stop", None)
        assert rollout.metrics == {"turns": 3, "forks": 0, "replies": 3, "environment_reward": 1.5}
        assert [m["role"] for m in rollout.messages] == ["user", "assistant"] * 3
        assert rollout.text == rollout.messages[-1]["content"]
        check_tokens(rollout)
    assert text_of(rollouts[0].trajectories[0]).startswith(
        "User:\n2+3?\n\nAssistant:\nanswer 1 of 1#\n\nUser:\nAgain 1."
    )
    assert [episode.closed for episode in source.environment.episodes] == [1, 1, 1]


def test_equal_seeds_give_equal_rollouts_and_turns_have_their_own_seeds():
    first, second = (collect(build(), ScriptedPolicy(number)) for _ in range(2))
    assert [r.messages for r in first] == [r.messages for r in second]
    policy = ScriptedPolicy(number)
    collect(build(), policy, seeds=range(20))
    seeds = [seed for _, seed in policy.contexts]
    assert len(set(seeds)) == 60
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_turn_limit_ends_the_rollout_after_the_last_reply():
    source = build(turns=9, max_turns=2)
    (rollout,) = collect(source, ScriptedPolicy(number), seeds=[1])
    assert (rollout.finish, rollout.metrics["turns"], source.environment.episodes[0].replies) == ("length", 2, 2)


@pytest.mark.parametrize("room", range(1, 70, 4))
def test_a_full_context_ends_the_rollout(room):
    prompt = len("User:\n2+3?\n\nAssistant:\n")
    policy = ScriptedPolicy(number, max_context=prompt + room)
    (rollout,) = collect(build(), policy, seeds=[1])
    total = sum(len(s.tokens) for s in rollout.trajectories[0])
    assert rollout.finish == "length"
    assert total <= policy.max_context
    check_tokens(rollout)


def test_a_first_prompt_that_fills_the_context_ends_the_rollout():
    (rollout,) = collect(build(), ScriptedPolicy(number, max_context=5), seeds=[1])
    assert (rollout.finish, rollout.trajectories, rollout.num_drawn) == ("length", (), 0)


def test_limits_of_an_answer_reach_the_policy():
    source = build(max_tokens=4)
    (rollout,) = collect(source, ScriptedPolicy(number), seeds=[1])
    assert (rollout.finish, rollout.num_drawn, rollout.text) == ("length", 4, "answ")
    assert source.environment.episodes[0].replies == 0
    (rollout,) = collect(build(stop=("of",)), ScriptedPolicy(number), seeds=[1])
    assert rollout.messages[1]["content"] == "answer 1 "
    assert "answer 1 of#\n\nUser:" in text_of(rollout.trajectories[0])


async def hang(*_):
    await asyncio.sleep(60)


async def fail(*_):
    raise ValueError("no such city")


async def say_nothing(_):
    return Reply()


@pytest.mark.parametrize(
    ("plan", "error", "turns"),
    [
        ({"start": fail}, "start: ValueError: no such city (test_multi_turn.py:", 0),
        ({"start": hang}, "start took longer than 0.05 s", 0),
        ({2: fail}, "reply: ValueError: no such city (test_multi_turn.py:", 2),
        ({1: hang}, "reply took longer than 0.05 s", 1),
        ({2: say_nothing}, "the reply has no messages", 2),
        ({"close": fail}, "close: ValueError: no such city", 3),
        ({"close": hang}, "close took longer than 0.05 s", 3),
    ],
)
def test_a_failure_of_the_environment_is_a_rollout_with_an_error(plan, error, turns):
    source = build(plan=plan, time_limit=0.05)
    for rollout in collect(source, ScriptedPolicy(number), seeds=[1, 2]):
        assert rollout.finish == "error"
        assert error in rollout.error
        assert rollout.metrics["turns"] == turns
        assert sum(s.drawn for t in rollout.trajectories for s in t) == turns
    assert all(episode.closed == 1 for episode in source.environment.episodes)


def test_a_timeout_of_the_environment_itself_is_its_own_error():
    async def time_out(_):
        raise TimeoutError("the database is slow")

    (rollout,) = collect(build(plan={1: time_out}), ScriptedPolicy(number), seeds=[1])
    assert "TimeoutError: the database is slow" in rollout.error


def test_a_failure_of_the_policy_is_raised_and_closes_all_episodes():
    def break_down(context, seed):
        if seed == 2:
            raise RuntimeError("the engine failed")
        return "fine"

    source = build(plan={1: hang})
    with pytest.raises(RuntimeError, match="the engine failed"):
        collect(source, ScriptedPolicy(break_down))
    assert [episode.closed for episode in source.environment.episodes] == [1, 1, 1]


def test_rollouts_run_at_the_same_time():
    running, most = 0, 0

    async def wait(_):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return Reply(done=True)

    collect(build(plan={1: wait}), ScriptedPolicy(number), seeds=range(16))
    assert most == 16


def test_a_rewritten_history_forks_the_trajectory():
    async def shorten(message):
        summary = ({"role": "user", "content": f"Summary: {message['content']}"},)
        return Reply(history=summary, messages=({"role": "user", "content": "Go on."},))

    (rollout,) = collect(build(plan={1: shorten}), ScriptedPolicy(number), seeds=[1])
    first, second = rollout.trajectories
    assert [len(first), len(second)] == [2, 4]
    assert text_of(second[:1]) == "User:\nSummary: answer 1 of 1\n\nUser:\nGo on.\n\nAssistant:\n"
    assert rollout.metrics["forks"] == 1
    check_tokens(rollout)


def hermes_policy(folder, script):
    template = hermes_template(folder, HERMES_WITH_ENDS).config
    text = TextProcessor.Config(template=template).build(tokenizer=ByteTokenizer.Config().build())
    return ScriptedPolicy(script, text)


def test_calls_and_reasoning_reach_the_environment(tmp_path):
    calls = []

    async def call(message):
        calls.append(message)
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
        return Reply(messages=(result,))

    def script(context, seed):
        if "<|tool|>" in context:
            return "It is sunny."
        return '<think>Hm.</think>One moment.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'

    example = Example(id="rome", prompt=({"role": "user", "content": "Weather?"},), tools=(WEATHER,))
    first, second = (
        collect(build(turns=2, plan={1: call}), hermes_policy(tmp_path, script), seeds=[1], example=example)[0]
        for _ in range(2)
    )
    message = calls[0]
    assert (message["content"], message["reasoning_content"]) == ("One moment.", "Hm.")
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome"}
    assert first.messages == second.messages  # with the ids of the calls
    assert len(first.messages[1]["tool_calls"][0]["id"]) == 9
    assert (first.text, first.metrics["forks"]) == ("It is sunny.", 0)
    check_tokens(first)


def test_tools_of_an_unknown_format_are_an_error():
    example = Example(id="rome", prompt="Weather?", tools=(WEATHER,))
    with pytest.raises(ConfigError, match=r"formats\.tool_parser"):
        collect(build(), ScriptedPolicy(number), example=example)
    formats = RolloutFormats.Config(tool_parser="none")
    assert collect(build(formats=formats), ScriptedPolicy(number), example=example)[0].finish == "stop"


def test_a_template_that_rejects_a_later_message_fails_one_rollout(tmp_path):
    refusal = "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    source = f"{{% for m in messages %}}{refusal}{{{{ m.content }}}}{{% endfor %}}"
    (tmp_path / "t.jinja").write_text(source)
    template = ChatTemplate.Config(path=str(tmp_path / "t.jinja"))
    text = TextProcessor.Config(template=template).build(tokenizer=ByteTokenizer.Config().build())
    tool = {"role": "tool", "content": "12"}
    with pytest.raises(InputError, match="no tools"):
        collect(build(), ScriptedPolicy(number, text), example=Example(id="x", prompt=(tool,)))

    async def use_tool(_):
        return Reply(messages=(tool,))

    (rollout,) = collect(build(plan={1: use_tool}), ScriptedPolicy(number, text), seeds=[1])
    assert rollout.finish == "error"
    assert "no tools" in rollout.error


@pytest.mark.slow
def test_a_model_trains_on_turns(tmp_path, monkeypatch):
    """The probabilities of the training step are those of the rollouts, although the environment wrote tokens between them."""
    monkeypatch.syspath_prepend(str(ROOT / "examples/rl"))
    monkeypatch.chdir(tmp_path)
    calculator = importlib.import_module("calculator")
    calculator.train_base("base", steps=30)
    calculator.train_policy("policy", "base", steps=2)
    steps = [json.loads(line) for line in (tmp_path / "policy/metrics.jsonl").read_text().splitlines()]
    differences = [step["train_rollout_difference"] for step in steps if "train_rollout_difference" in step]
    assert len(differences) == 2
    assert max(differences) < 1e-4
    assert all(step["turns"] >= 1 for step in steps if "turns" in step)
