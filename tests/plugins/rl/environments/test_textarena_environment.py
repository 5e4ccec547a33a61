"""A game of TextArena."""

import asyncio
import random
import re

import pytest

from axlearn_core.errors import RequestError
from axlearn_plugins_rl.environments.multi_turn import MultiTurn
from axlearn_plugins_rl.environments.textarena_environment import TextArenaEnvironment
from axlearn_plugins_rl.rollout_contracts import Example
from axlearn_plugins_rl.testing.scripted_policy import ScriptedPolicy
from support.needs import require

pytestmark = pytest.mark.slow
require("textarena")
EXAMPLE = Example(id="guess", prompt="")


def bisect(context, seed):
    low, high = 1, 20
    for guess, hint in re.findall(r"I guess \[(\d+)\].*?target number is (higher|lower)", context, re.DOTALL):
        low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
    return f"I guess [{(low + high) // 2}]"


def play(seeds, script=bisect, name="GuessTheNumber-v0"):
    source = MultiTurn.Config(environment=TextArenaEnvironment.Config(name=name), max_turns=12).build()
    return asyncio.run(source.collect(EXAMPLE, ScriptedPolicy(script, max_context=20_000), seeds))


def test_games_depend_only_on_their_seed():
    before = random.getstate()
    first, second = play(range(8)), play([*range(7, -1, -1)])[::-1]
    assert random.getstate() == before
    assert [r.messages for r in first] == [r.messages for r in second]
    assert all((r.finish, r.metrics["environment_reward"]) == ("stop", 1.0) for r in first)
    assert len({r.text for r in first}) > 2
    assert first[0].messages[0]["content"].startswith("You are Player 0. You are playing Guess The Number.")
    assert first[0].messages[2]["content"].startswith("The target number is")


def test_invalid_moves_end_the_game():
    (rollout,) = play([1], lambda context, seed: "no number")
    assert (rollout.finish, rollout.metrics["turns"]) == ("stop", 2)
    assert rollout.metrics["environment_reward"] < 1


def test_games_for_two_players_are_errors():
    (rollout,) = play([1], name="TicTacToe-v0")
    assert rollout.finish == "error"
    assert "number of players" in rollout.error


def test_an_unknown_game_names_the_nearest():
    with pytest.raises(RequestError, match="GuessTheNumber-v0"):
        TextArenaEnvironment.Config(name="GuesTheNumber-v0").build()
