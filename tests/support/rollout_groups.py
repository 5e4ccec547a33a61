"""Rollouts without a model, their groups, and a policy that answers without an engine."""

import asyncio

import numpy as np

from axlearn_core.config import Configurable, node, setting
from axlearn_plugins_rl.rollout_contracts import Completion, Example, Group, Rollout, Score, Segment
from axlearn_plugins_transformer.text.processor import TextProcessor
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer


def rollout(answer="5", *, prompt="2+3=", number=0, seed=0, finish="stop", version=0, metrics=None):
    """Return a rollout whose tokens are bytes. The token 256 ends the answer."""
    drawn = np.asarray([*answer.encode(), 256], np.int32)
    logprobs = -0.1 * np.arange(1, len(drawn) + 1, dtype=np.float32)
    segments = (
        Segment(tokens=np.asarray([*prompt.encode()], np.int32)),
        Segment(tokens=drawn, drawn=True, logprobs=logprobs, model_logprobs=logprobs - 1, version=version),
    )
    example = Example(id=str(number), prompt=prompt, answer="5")
    return Rollout(
        example=example, seed=seed, trajectories=(segments,), text=answer, finish=finish, metrics=metrics or {}
    )


def group(rewards=(1.0, 0.0), *, number=0, errors=(), version=0, **options):
    """Return a group with one rollout per reward. `errors` are the indices of rewards that failed."""
    rollouts = tuple(rollout(str(i), number=number, seed=i, version=version, **options) for i, _ in enumerate(rewards))
    scores = tuple(
        Score(value=value, parts={"exact": value}, error="failed" if i in errors else None)
        for i, value in enumerate(rewards)
    )
    return Group(example=rollouts[0].example, rollouts=rollouts, scores=scores)


class ConstantPolicy:
    """Answers each context with the last byte of the seed, after one turn of the event loop."""

    def __init__(self, max_context=16):
        self.text = TextProcessor.Config().build(tokenizer=ByteTokenizer.Config().build())
        self.version, self.max_context = 0, max_context
        self.seeds = []

    async def sample(self, context, *, seed, max_tokens=None, stop=()):
        await asyncio.sleep(0)
        self.seeds.append(seed)
        answer = rollout(str(seed % 10), version=self.version)
        return Completion(segment=answer.trajectories[0][1], text=answer.text, finish="stop")


class Sums(Configurable):
    """A task of sums, for training and held out."""

    @node
    class Config(Configurable.Config["Sums"]):
        size: int = setting(default=10, ge=0)
        held_out: int = setting(default=2, ge=0)

    def __init__(self, cfg):
        self.cfg = cfg

    def examples(self, split):
        count = self.cfg.size if split == "train" else self.cfg.held_out
        first = 0 if split == "train" else self.cfg.size
        return [Example(id=str(i), prompt=f"{i}+1=", answer=str(i + 1)) for i in range(first, first + count)]

    def describe(self):
        return {"size": self.cfg.size}
