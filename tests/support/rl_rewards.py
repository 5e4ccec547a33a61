"""Tasks, rewards and rollouts for tests of reinforcement learning."""

import os
import time
from pathlib import Path

import numpy as np

from axlearn_core.config import node
from axlearn_plugins_rl.rewards import JudgedReward
from axlearn_plugins_rl.rollout_contracts import Example, Rollout, Score, Segment
from axlearn_plugins_rl.tasks import GeneratedTask

FOUR = Example(id="sum", prompt="2 + 2 = ", answer="4")


def rollout_of(text, example=FOUR, *, drawn=4, **fields):
    """A rollout with a prompt of three tokens and `drawn` drawn tokens."""
    logprobs = -np.arange(drawn, dtype=np.float32)
    tokens = np.arange(drawn, dtype=np.int32)
    segments = (
        Segment(tokens=np.arange(3, dtype=np.int32)),
        Segment(tokens=tokens, drawn=True, logprobs=logprobs, model_logprobs=logprobs, version=7),
    )
    return Rollout(**{"example": example, "seed": 1, "trajectories": (segments,), "text": text, **fields})


class Sums(GeneratedTask):
    """Sums of two numbers. An answer that contains the sum has the score 1."""

    @node
    class Config(GeneratedTask.Config):
        """The numbers."""

        digits: int = 2

    def example(self, index, rng):
        a, b = (rng.randrange(10**self.config.digits) for _ in range(2))
        return Example(id=str(index), prompt=f"{a} + {b} = ", answer=str(a + b))

    def score(self, example, text):
        return float(example.answer in text)


class Obedient(JudgedReward):
    """Does what the text says. Each call adds a line to a file."""

    @node
    class Config(JudgedReward.Config):
        """The file, or None."""

        log: str | None = None

    def judge(self, example, text):
        if self.config.log:
            with Path(self.config.log).open("a") as file:
                file.write(f"{text}\n")
        word, _, value = text.partition(" ")
        if word == "sleep":
            time.sleep(float(value))
            return 0.5
        if word == "exit":
            os._exit(int(value))
        if word == "raise":
            raise ZeroDivisionError(value)
        if word == "print":
            print(value)
            return 0.25
        results = {"nan": float("nan"), "text": "1", "nothing": None, "yes": True, "array": np.float32(0.5)}
        if word == "score":
            return Score(value=2.0, parts={"a": 1.0}, metrics={"words": 3.0})
        return results[word] if word in results else float(text)


class Unreadable:
    """An object that no process can read."""

    id = "unreadable"

    def __reduce__(self):
        return exec, ("raise ValueError('this process cannot read it')",)


def make_echo():
    """Return a judge that returns its argument, or something unreadable."""
    return lambda value: Unreadable() if value == "unreadable" else value


def make_obedient():
    """Return a judge that does what its argument says."""
    reward = Obedient.Config().build()
    return lambda text: reward.judge(None, text)
