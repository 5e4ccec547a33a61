"""Groups without their tokens and texts, as processes exchange them. This module does not import JAX."""

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from axlearn_plugins_rl.rollout_contracts import Example, Group, Rollout, Score, Segment


def encode_scores(group: Group) -> dict[str, Any]:
    """Return the scores and metrics of a group, and the lengths of its rollouts, as JSON values."""
    return {
        "id": group.example.id,
        "scores": [attrs.asdict(score) for score in group.scores],
        "rollouts": [
            {"finish": rollout.finish, "metrics": dict(rollout.metrics), "drawn": rollout.num_drawn}
            for rollout in group.rollouts
        ],
    }


def decode_scores(tree: Mapping[str, Any]) -> Group:
    """Return the group that `encode_scores` encoded.

    Its rollouts have the right number of drawn tokens, which are all 0. They have no texts, and the example has only its id.
    """
    example = Example(id=tree["id"], prompt="")
    return Group(
        example=example,
        rollouts=tuple(_decode_rollout(example, entry) for entry in tree["rollouts"]),
        scores=tuple(Score(**score) for score in tree["scores"]),
    )


def _decode_rollout(example: Example, entry: Mapping[str, Any]) -> Rollout:
    tokens = np.broadcast_to(np.int32(0), (entry["drawn"],))  # takes no memory per token
    return Rollout(
        example=example,
        seed=0,
        trajectories=((Segment(tokens=tokens, drawn=True),),),
        text="",
        finish=entry["finish"],
        metrics=entry["metrics"],
    )
