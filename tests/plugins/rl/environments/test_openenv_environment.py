"""Episodes on a server that speaks OpenEnv's protocol."""

import asyncio
import json

import pytest

from axlearn_core.errors import RequestError
from axlearn_plugins_rl.environments.multi_turn import MultiTurn
from axlearn_plugins_rl.environments.openenv_environment import OpenEnvEnvironment
from axlearn_plugins_rl.rollout_contracts import Example
from axlearn_plugins_rl.testing.scripted_policy import ScriptedPolicy
from support.needs import require

websockets = require("websockets.asyncio.server")
EXAMPLE = Example(id="guess", prompt="Guess.")


class GuessServer:
    """Higher or lower. The number depends on the seed."""

    def __init__(self, plan=None):
        self.open, self.sessions, self.plan = 0, 0, plan or {}

    async def __call__(self, socket):
        self.open, self.sessions = self.open + 1, self.sessions + 1
        try:
            async for text in socket:
                message = json.loads(text)
                if message["type"] == "close":
                    return
                await socket.send(json.dumps(self.plan.get(message["type"]) or self.answer(socket, message)))
        finally:
            self.open -= 1

    def answer(self, socket, message):
        if message["type"] == "reset":
            socket.number = message["data"]["seed"] % 10
            return self.observe("Guess a number from 0 to 9.", None, False)
        guess = int(message["data"]["message"])
        hint = "higher" if guess < socket.number else "lower"
        return self.observe(hint, float(guess == socket.number), guess == socket.number)

    @staticmethod
    def observe(text, reward, is_over):
        return {"type": "observation", "data": {"observation": {"text": text}, "reward": reward, "done": is_over}}


def bisect(context, seed):
    """Return the guess in the middle of the possible numbers."""
    low, high, guess = 0, 9, None
    for line in context.split("\n"):
        word = line.strip().rstrip("\ufdd2")
        if word.isdigit():
            guess = int(word)
        elif guess is not None and "higher" in word:
            low = guess + 1
        elif guess is not None and "lower" in word:
            high = guess - 1
    return str((low + high) // 2)


def play(server, seeds, **settings):
    async def run():
        async with websockets.serve(server, "127.0.0.1", 0) as listener:
            port = listener.sockets[0].getsockname()[1]
            environment = OpenEnvEnvironment.Config(**{"url": f"http://127.0.0.1:{port}", **settings})
            source = MultiTurn.Config(environment=environment, time_limit=2.0).build()
            return await source.collect(EXAMPLE, ScriptedPolicy(bisect), seeds)

    return asyncio.run(run())


def test_episodes_play_on_the_server():
    server = GuessServer()
    rollouts = play(server, range(10), observation="text")
    assert [rollout.error for rollout in rollouts] == [None] * 10
    assert all(rollout.finish == "stop" for rollout in rollouts)
    assert all(rollout.metrics["environment_reward"] == 1.0 for rollout in rollouts)
    assert [int(rollout.text) for rollout in rollouts] == list(range(10))
    assert [m["content"] for m in rollouts[0].messages[:2]] == ["Guess.", "Guess a number from 0 to 9."]
    assert (server.sessions, server.open) == (10, 0)


def test_observations_are_json_without_a_field():
    (rollout,) = play(GuessServer(), [4])
    assert rollout.messages[1]["content"] == '{"text": "Guess a number from 0 to 9."}'


@pytest.mark.parametrize(
    ("plan", "settings", "error"),
    [
        ({"reset": {"type": "error", "data": {"message": "full", "code": "CAPACITY"}}}, {}, 'reset with {"type": "err'),
        ({"step": {"type": "error", "data": {"message": "bad"}}}, {}, '"message": "bad"'),
        ({"step": [1]}, {}, "the server answered step with [1]"),
        ({}, {"observation": "board"}, "the observation has no field 'board'; it has text"),
        ({}, {"url": "http://127.0.0.1:9"}, "start: "),
        ({}, {"action": "guess"}, "ConnectionClosed"),
    ],
)
def test_failures_of_the_server_are_rollouts_with_an_error(plan, settings, error):
    server = GuessServer(plan)
    (rollout,) = play(server, [3], **settings)
    assert rollout.finish == "error"
    assert error in rollout.error
    assert server.open == 0


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "", "http://"])
def test_a_url_that_is_not_a_server_is_refused(url):
    with pytest.raises(RequestError, match="url is not the URL of a server"):
        OpenEnvEnvironment.Config(url=url).build()
