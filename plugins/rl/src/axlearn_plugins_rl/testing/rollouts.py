"""Rollouts without a model, for tests of rewards."""

from typing import Any

import numpy as np

from axlearn_plugins_rl.rollout_contracts import Example, Rollout, Segment

STRANGE_TEXTS = (
    "",
    " \n\t",
    "\x00\ud800\u2028",
    "9" * 5000,
    "((((" * 2000,
    "<answer></answer>",
    "{",
    "\\frac{1}{",
    "1e999",
    "NaN",
    "😀é",
)
"""Texts that a model may write before it has learned the format."""


def answer_rollout(example: Example, text: str, *, num_drawn: int = 4, **fields: Any) -> Rollout:
    """Return a rollout with a text as the answer of the policy.

    Args:
        example: The example.
        text: The answer. The tokens of the rollout do not depend on it.
        num_drawn: Number of drawn tokens.
        fields: Other fields of the rollout.
    """
    logprobs = -np.arange(num_drawn, dtype=np.float32)
    drawn = Segment(
        tokens=np.arange(num_drawn, dtype=np.int32), drawn=True, logprobs=logprobs, model_logprobs=logprobs, version=0
    )
    trajectory = (Segment(tokens=np.arange(3, dtype=np.int32)), drawn)
    return Rollout(**{"example": example, "seed": 0, "trajectories": (trajectory,), "text": text, **fields})
