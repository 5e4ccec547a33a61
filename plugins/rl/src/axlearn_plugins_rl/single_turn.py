"""Rollouts with one turn: a prompt and an answer."""

import asyncio
from collections.abc import Sequence

import numpy as np

from axlearn_core.config import Configurable, node
from axlearn_core.errors import InputError
from axlearn_plugins_rl.prompts import encode_prompt
from axlearn_plugins_rl.recorded_experts import join_completion
from axlearn_plugins_rl.rollout_contracts import Completion, Example, Policy, Rollout, Segment


class SingleTurn(Configurable):
    """Lets the policy continue the prompt of each example. See `rollout_contracts.RolloutSource`."""

    @node
    class Config(Configurable.Config["SingleTurn"]):
        """No settings."""

    def __init__(self, cfg: Config):
        pass

    async def collect(self, example: Example, policy: Policy, seeds: Sequence[int]) -> Sequence[Rollout]:
        """Return one rollout for each seed.

        Raises:
            InputError: The prompt leaves no room for an answer.
        """
        context = encode_context(example, policy)
        prompt = Segment(tokens=np.asarray(context, np.int32))
        completions = await asyncio.gather(*(policy.sample(context, seed=seed) for seed in seeds))
        return [_build_rollout(example, prompt, seed, c) for seed, c in zip(seeds, completions, strict=True)]


def encode_context(example: Example, policy: Policy) -> list[int]:
    """Return the tokens of an example's prompt.

    Raises:
        InputError: The prompt leaves no room for an answer.
    """
    context = encode_prompt(policy.text, example)
    if len(context) >= policy.max_context:
        raise InputError(
            f"the prompt of the example {example.id} leaves no room for an answer\n    got: {len(context)} tokens\n"
            f"    expected: fewer than {policy.max_context}\n    fix: raise input.sequence_length, or shorten the task's prompts"
        )
    return context


def _build_rollout(example: Example, prompt: Segment, seed: int, completion: Completion) -> Rollout:
    answer = {"role": "assistant", "content": completion.text}
    return Rollout(
        example=example,
        seed=seed,
        trajectories=(join_completion((prompt,), completion),),
        text=completion.text,
        messages=() if isinstance(example.prompt, str) else (*example.prompt, answer),
        finish=completion.finish,
    )
