"""The suites pass for this plugin's parts, and fail for parts with a planted mistake."""

import asyncio
import inspect
import random
from pathlib import Path

import attrs
import numpy as np
import pytest

from axlearn_core.config import Configurable, node
from axlearn_plugins_rl.environments.multi_turn import MultiTurn
from axlearn_plugins_rl.rewards.rollout_rewards import EnvironmentReward, LengthReward
from axlearn_plugins_rl.rewards.task_reward import TaskReward
from axlearn_plugins_rl.rewards.text_rewards import ExactReward, FormatReward
from axlearn_plugins_rl.rewards.weighted_reward import WeightedReward
from axlearn_plugins_rl.rollout_buffer import RolloutBuffer
from axlearn_plugins_rl.rollout_contracts import Example, Reply, Score
from axlearn_plugins_rl.single_turn import SingleTurn
from axlearn_plugins_rl.tasks.chat_task import ChatTask
from axlearn_plugins_rl.tasks.jsonl_task import JsonlTask
from axlearn_plugins_rl.testing import (
    BufferSuite,
    EnvironmentSuite,
    RewardSuite,
    RolloutSourceSuite,
    TaskSuite,
    answer_rollout,
)
from support.rl_rewards import FOUR, Sums


def failing_tests(suite):
    """Return the names of the tests of a suite that fail."""
    names = [name for name, _ in inspect.getmembers(suite, inspect.isfunction) if name.startswith("test_")]
    failed = set()
    for name in names:
        try:
            inspect.getattr_static(suite, name)(suite())
        except pytest.skip.Exception:
            continue
        except (Exception, pytest.fail.Exception):
            failed.add(name.removeprefix("test_"))
    return failed


class TestSums(TaskSuite):
    config = Sums.Config(size=120)


class TestChatTask(TaskSuite):
    config = ChatTask.Config(base=Sums.Config(size=50), system="Be brief.")


class TestJsonlTask(TaskSuite):
    @pytest.fixture(autouse=True)
    def file(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("rows.jsonl").write_text("".join(f'{{"prompt": "{i} = ", "answer": {i}}}\n' for i in range(50)))

    config = JsonlTask.Config(paths="rows.jsonl", validation_fraction=0.3)


class Task(Sums):
    def __init__(self, cfg, *, seed=0):
        super().__init__(cfg, seed=seed)
        self.rng = random.Random()


class Unsteady(Task):
    def example(self, index, rng):
        return super().example(index, self.rng)


class EqualIds(Task):
    def example(self, index, rng):
        return attrs.evolve(super().example(index, rng), id="a")


class Leaking(Task):
    def examples(self, split):
        return super().examples("train")


class Endless(Task):
    def examples(self, split):
        class Wrapping(list):
            def __getitem__(self, index):
                return super().__getitem__(index % len(self))

        return Wrapping(super().examples(split))


class Vague(Task):
    def describe(self):
        return {"created": self.rng.random()}


class Textual(Task):
    def score(self, example, text):
        return "good"


@pytest.mark.parametrize(
    ("mutant", "caught"),
    [
        (Task, set()),
        (Unsteady, {"an_index_always_returns_the_same_example", "the_description_is_stable"}),
        (EqualIds, {"ids_are_unique"}),
        (Leaking, {"ids_are_unique", "splits_share_no_example"}),
        (Endless, {"an_index_always_returns_the_same_example"}),
        (Vague, {"the_description_is_stable"}),
        (Textual, {"scores_are_numbers"}),
    ],
)
def test_task_mutants_are_caught(mutant, caught):
    suite = type("Suite", (TaskSuite,), {"config": mutant.Config(size=60, digits=3)})
    assert failing_tests(suite) >= caught
    assert bool(failing_tests(suite)) == bool(caught)


class TestExact(RewardSuite):
    config = ExactReward.Config()
    cases = ((answer_rollout(FOUR, "4"), 1.0), (answer_rollout(FOUR, "5"), 0.0))


class TestFormat(RewardSuite):
    config = FormatReward.Config()
    cases = ((answer_rollout(FOUR, "<answer>5</answer>"), 1.0), (answer_rollout(FOUR, "5"), 0.0))


class TestTask(RewardSuite):
    config, task = TaskReward.Config(), Sums.Config().build()
    cases = ((answer_rollout(FOUR, "It is 4."), 1.0), (answer_rollout(FOUR, "5"), 0.0))


class TestWeighted(RewardSuite):
    config = WeightedReward.Config(parts={"exact": 1.0, "format": 0.5})
    cases = ((answer_rollout(FOUR, "<answer>4</answer>"), 1.5), (answer_rollout(FOUR, "4"), 1.0))


class TestLength(RewardSuite):
    config = LengthReward.Config(limit=8, margin=4)
    cases = tuple((answer_rollout(FOUR, "4", num_drawn=n), r) for n, r in ((4, 0.0), (6, -0.5), (9, -1.0)))


class TestEnvironmentReward(RewardSuite):
    config = EnvironmentReward.Config()
    cases = tuple((answer_rollout(FOUR, "4", metrics={"environment_reward": r}), r) for r in (0.25, 1.0))


class Reward(Configurable):
    """1 if the text is 4."""

    @node
    class Config(Configurable.Config["Reward"]):
        pass

    def __init__(self, cfg):
        self.count = 0

    def value(self, rollout):
        return float(rollout.text == "4")

    async def score(self, rollouts):
        scores = [Score(value=self.value(r), error=r.error) for r in rollouts]
        await asyncio.sleep(0)
        return scores


class Shuffled(Reward):
    async def score(self, rollouts):
        return sorted(await super().score(rollouts), key=lambda score: score.value)


class Missing(Reward):
    async def score(self, rollouts):
        return [s for s in await super().score(rollouts) if s.error is None]


class Lenient(Reward):
    async def score(self, rollouts):
        return [Score(value=self.value(r)) for r in rollouts]


class Fragile(Reward):
    def value(self, rollout):
        return float(int(rollout.text or 0) == 4)


class Counting(Reward):
    def value(self, rollout):
        self.count += 1
        return super().value(rollout) + self.count


class Grabbing(Reward):
    def value(self, rollout):
        rollout.trajectories[0][0].tokens[:] = 0
        return super().value(rollout)


class Infinite(Reward):
    def value(self, rollout):
        return float("inf") if len(rollout.text) > 9 else super().value(rollout)


@pytest.mark.parametrize(
    ("mutant", "caught"),
    [
        (Reward, set()),
        (Shuffled, {"rewards_are_as_expected", "scores_have_the_order_of_the_rollouts"}),
        (Missing, {"failed_rollouts_have_errors"}),
        (Lenient, {"failed_rollouts_have_errors"}),
        (Fragile, {"any_text_can_be_scored"}),
        (Counting, {"scores_have_the_order_of_the_rollouts", "groups_can_be_scored_at_the_same_time"}),
        (Grabbing, {"rollouts_do_not_change"}),
        (Infinite, {"any_text_can_be_scored"}),
    ],
)
def test_reward_mutants_are_caught(mutant, caught):
    def cases():
        return [(answer_rollout(FOUR, "4"), 1.0), (answer_rollout(FOUR, "5"), 0.0)]

    suite = type("Suite", (RewardSuite,), {"config": mutant.Config(), "cases": property(lambda self: cases())})
    assert failing_tests(suite) >= caught
    assert bool(failing_tests(suite)) == bool(caught)


class Guess(Configurable):
    """The policy guesses a number from 1 to 9."""

    @node
    class Config(Configurable.Config["Guess"]):
        pass

    def __init__(self, cfg):
        pass

    async def start(self, example, *, seed):
        return self.Game(self, random.Random(seed).randint(1, 9))

    class Game:
        def __init__(self, environment, number):
            self.environment, self.number, self.is_open = environment, number, True

        async def reply(self, message):
            await asyncio.sleep(0)
            assert self.is_open
            guess = int(message["content"])
            if guess == self.number:
                return Reply(done=True, reward=1.0)
            hint = "too low" if guess < self.number else "too high"
            return Reply(messages=({"role": "user", "content": hint},), reward=0.0)

        async def close(self):
            assert self.is_open
            self.is_open = False


GUESSES = {
    "examples": [Example(id="a", prompt="Guess."), Example(id="b", prompt="Guess.")],
    "answers": [str(n) for n in range(1, 10)],
    "rewards": [0.0] * 6 + [1.0],
}


class TestGuess(EnvironmentSuite):
    config = Guess.Config()
    examples, answers, rewards = GUESSES["examples"], GUESSES["answers"], GUESSES["rewards"]


async def speak_as_policy(self, message):
    reply = await Guess.Game.reply(self, message)
    return attrs.evolve(reply, messages=tuple({**m, "role": "assistant"} for m in reply.messages))


async def go_on(self, message):
    return attrs.evolve(await Guess.Game.reply(self, message), done=False)


async def say_nothing(self, message):
    return attrs.evolve(await Guess.Game.reply(self, message), messages=())


async def pay_nan(self, message):
    return attrs.evolve(await Guess.Game.reply(self, message), reward=float("nan"))


async def ignore_seed(self, message):
    return Reply(done=True, reward=random.random())


async def share(self, message):
    shared = vars(self.environment).setdefault("shared", [])
    shared.append(message)
    await asyncio.sleep(0)
    return attrs.evolve(await Guess.Game.reply(self, message), reward=float(len(shared)))


async def close_badly(self):
    raise OSError("the tool is gone")


@pytest.mark.parametrize(
    ("method", "function", "caught"),
    [
        ("reply", Guess.Game.reply, set()),
        ("reply", speak_as_policy, {"replies_are_valid"}),
        ("reply", go_on, {"episodes_end"}),
        ("reply", say_nothing, {"replies_are_valid"}),
        ("reply", pay_nan, {"replies_are_valid", "rewards_are_as_expected"}),
        ("reply", ignore_seed, {"equal_seeds_give_equal_episodes", "rewards_are_as_expected"}),
        ("reply", share, {"episodes_are_independent"}),
        ("close", close_badly, {"episodes_close_after_any_answer"}),
    ],
)
def test_environment_mutants_are_caught(method, function, caught):
    cls = type("Game", (Guess.Game,), {method: function})

    class Mutant(Guess):
        Game = cls

    suite = type("Suite", (EnvironmentSuite,), {"config": Mutant.Config(), **GUESSES})
    assert failing_tests(suite) >= caught
    assert bool(failing_tests(suite)) == bool(caught)


class TestRolloutBuffer(BufferSuite):
    config, ahead = RolloutBuffer.Config(), 0


class TestRolloutBufferAhead(BufferSuite):
    config, ahead = RolloutBuffer.Config(ahead=3), 3


class Eager(RolloutBuffer):
    def admits(self, number, version):
        return number <= version + 1 + self.cfg.ahead


class Late(RolloutBuffer):
    def admits(self, number, version):
        return super().admits(number, version) and number != 5


class Keeping(RolloutBuffer):
    def take(self, number):
        return self._batches[number]


class Unsorted(RolloutBuffer):
    def numbers(self):
        return list(self._batches)


class Forgetful(RolloutBuffer):
    def set_state(self, state):
        before = dict(self._batches)
        super().set_state(state)
        self._batches |= before


class Rounding(RolloutBuffer):
    def get_state(self):
        state = super().get_state()
        for groups in state.values():
            for group in groups:
                for score in group["scores"]:
                    score["value"] = round(score["value"], 6)
        return state


@pytest.mark.parametrize(
    ("mutant", "caught"),
    [
        (RolloutBuffer, set()),
        (Eager, {"ages_are_bounded"}),
        (Late, {"ages_are_bounded"}),
        (Keeping, {"a_batch_can_be_taken_once", "batches_are_taken_as_they_were_put"}),
        (Unsorted, {"batches_are_taken_as_they_were_put"}),
        (Forgetful, {"state_restores_the_batches", "an_empty_buffer_has_a_state"}),
        (Rounding, {"state_restores_the_batches"}),
    ],
)
def test_buffer_mutants_are_caught(mutant, caught):
    suite = type("Suite", (BufferSuite,), {"config": mutant.Config(ahead=2), "ahead": 2})
    assert failing_tests(suite) == caught


CHAT = Example(id="chat", prompt=({"role": "user", "content": "2 + 2?"},), answer="4")


class TestSingleTurn(RolloutSourceSuite):
    config, examples = SingleTurn.Config(), (FOUR, CHAT)


class TestMultiTurn(RolloutSourceSuite):
    config, examples = MultiTurn.Config(environment=Guess.Config()), (CHAT,)

    def script(self, context, seed):
        return str(context.count("Assistant:"))


class Backward(SingleTurn):
    async def collect(self, example, policy, seeds):
        return (await super().collect(example, policy, seeds))[::-1]


def change_drawn(rollout, **changes):
    prompt, drawn = rollout.trajectories[0]
    return attrs.evolve(rollout, trajectories=((prompt, attrs.evolve(drawn, **changes)),))


class Shifted(SingleTurn):
    async def collect(self, example, policy, seeds):
        rollouts = await super().collect(example, policy, seeds)
        return [change_drawn(r, logprobs=np.roll(r.trajectories[0][1].logprobs, 1)) for r in rollouts]


class Encoding(SingleTurn):
    async def collect(self, example, policy, seeds):
        rollouts = await super().collect(example, policy, seeds)
        encoded = [np.asarray(policy.text.encode_prompt(r.text.upper()), np.int32) for r in rollouts]
        return [change_drawn(r, tokens=tokens) for r, tokens in zip(rollouts, encoded, strict=True)]


class Unversioned(SingleTurn):
    async def collect(self, example, policy, seeds):
        return [change_drawn(r, version=0) for r in await super().collect(example, policy, seeds)]


class Seedless(SingleTurn):
    async def collect(self, example, policy, seeds):
        rollouts = await super().collect(example, policy, [random.getrandbits(30) for _ in seeds])
        return [attrs.evolve(r, seed=seed) for r, seed in zip(rollouts, seeds, strict=True)]


class Silent(SingleTurn):
    async def collect(self, example, policy, seeds):
        try:
            return await super().collect(example, policy, seeds)
        except MemoryError as error:
            return [answer_rollout(example, "", seed=seed, finish="error", error=str(error)) for seed in seeds]


@pytest.mark.parametrize(
    ("mutant", "caught"),
    [
        (SingleTurn, set()),
        (Backward, {"rollouts_are_complete"}),
        (Shifted, {"tokens_are_those_of_the_policy"}),
        (Encoding, {"tokens_are_those_of_the_policy"}),
        (Unversioned, {"tokens_are_those_of_the_policy"}),
        (Seedless, {"equal_seeds_give_equal_rollouts"}),
        (Silent, {"failures_of_the_policy_are_raised"}),
    ],
)
def test_source_mutants_are_caught(mutant, caught):
    suite = type("Suite", (RolloutSourceSuite,), {"config": mutant.Config(), "examples": [FOUR, CHAT]})
    assert failing_tests(suite) >= caught
    assert bool(failing_tests(suite)) == bool(caught)
