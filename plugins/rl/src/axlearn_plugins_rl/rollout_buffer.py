"""The buffer of batches that are rolled out but not trained on yet."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from axlearn_core.config import Configurable, Node, node, setting
from axlearn_plugins_rl.rollout_contracts import Buffer, Example, Group, Rollout, Score, Segment


class RolloutBuffer(Configurable):
    """Holds up to `ahead` batches that were rolled out before their step. See `rollout_contracts.Buffer`."""

    @node
    class Config(Configurable.Config["RolloutBuffer"]):
        """The number of steps by which rollouts may run ahead of training.

        Attributes:
            ahead: Maximum age of the weights that draw a batch, in steps. 0 waits for the rollouts of each step. 1 rolls out the
                next batch while a step trains on the present one.
        """

        ahead: int = setting(default=0, ge=0, le=64)

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self._batches: dict[int, tuple[Group, ...]] = {}

    def admits(self, number: int, version: int) -> bool:
        """Return True if the weights are at most `ahead` steps older than the step that trains on the batch."""
        return version <= number <= version + self.cfg.ahead

    def put(self, number: int, groups: Sequence[Group]) -> None:
        """Add a batch."""
        self._batches[number] = tuple(groups)

    def take(self, number: int) -> Sequence[Group]:
        """Remove and return a batch. Raise `KeyError` if the buffer does not hold it."""
        return self._batches.pop(number)

    def numbers(self) -> Sequence[int]:
        """Return the numbers of the batches, in ascending order."""
        return sorted(self._batches)

    def get_state(self) -> Any:
        """Return the batches as JSON values and NumPy arrays, by number."""
        return {str(number): [encode_group(group) for group in self._batches[number]] for number in self.numbers()}

    def set_state(self, state: Any) -> None:
        """Restore the batches that `get_state` returned."""
        self._batches = {
            int(number): tuple(decode_group(group) for group in groups) for number, groups in state.items()
        }


def merge_batches(cfg: Node[Buffer], states: Sequence[Any]) -> dict[int, list[Group]]:
    """Return the whole batches of a job, by number, from the states of the buffers of its processes."""
    batches: dict[int, list[Group]] = {}
    for state in states:
        buffer = cfg.build()
        buffer.set_state(state)
        for number in list(buffer.numbers()):
            batches.setdefault(number, []).extend(buffer.take(number))
    return batches


def encode_group(group: Group) -> dict[str, Any]:
    """Return a group as a tree of JSON values and NumPy arrays. The rollouts omit the example, which they share."""
    tree = attrs.asdict(group)
    for rollout in tree["rollouts"]:
        del rollout["example"]
    return tree


def decode_group(tree: Mapping[str, Any]) -> Group:
    """Return the group that `encode_group` encoded."""
    example = _decode_example(tree["example"])
    return Group(
        example=example,
        rollouts=tuple(_decode_rollout(rollout, example) for rollout in tree["rollouts"]),
        scores=tuple(Score(**score) for score in tree["scores"]),
    )


def _decode_example(tree: Mapping[str, Any]) -> Example:
    prompt = tree["prompt"]
    return Example(
        **{**tree, "prompt": prompt if isinstance(prompt, str) else tuple(prompt), "tools": tuple(tree["tools"])}
    )


def _decode_rollout(tree: Mapping[str, Any], example: Example) -> Rollout:
    trajectories = tuple(tuple(_decode_segment(s) for s in trajectory) for trajectory in tree["trajectories"])
    return Rollout(**{**tree, "example": example, "trajectories": trajectories, "messages": tuple(tree["messages"])})


def _decode_segment(tree: Mapping[str, Any]) -> Segment:
    return Segment(**{**tree, "tokens": np.asarray(tree["tokens"], np.int32)})
