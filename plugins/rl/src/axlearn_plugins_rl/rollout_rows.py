"""Rows of a training batch from rollouts, their scores and their advantages.

Shapes: R rows, S positions per row.
"""

from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np

from axlearn_core.errors import WorkError
from axlearn_plugins_rl.rollout_contracts import Group, Rollout, Score, Segment, Trajectory
from axlearn_plugins_rl.task_input import EXPERTS_ENTRY, TaskInput
from axlearn_plugins_transformer.text.row_layout import first_fit


@attrs.frozen(eq=False)
class ScoredTrajectory:
    """A trajectory with the numbers of its row.

    Attributes:
        trajectory: The trajectory.
        advantages: Advantage of each token, float32 [number of tokens].
        reward: Reward of the rollout.
        is_trained: Whether the drawn tokens are trained on.
    """

    trajectory: Trajectory
    advantages: np.ndarray
    reward: float
    is_trained: bool

    @property
    def num_positions(self) -> int:
        """Number of positions in a row. The last token is only a target."""
        return max(0, sum(len(segment.tokens) for segment in self.trajectory) - 1)


def build_rows(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[Sequence[np.ndarray]]],
    cfg: TaskInput.Config,
    *,
    temperature: float,
    drop_dead: bool = False,
    processes: int = 1,
) -> dict[str, np.ndarray]:
    """Return the rows of one process, of the arrays that `TaskInput.Config.batch_shapes` declares.

    Each trajectory has its own row, unless `cfg.packing` is set. Targets have weight 1 if the policy drew them and the rollout
    has a score. All arrays are 0 at other positions, except for recorded experts and tokens, which are -1.

    Args:
        groups: Groups of the process.
        advantages: Advantages of the groups; see `rollout_contracts.Advantage`.
        cfg: Config of the input, with the number of rows and their length.
        temperature: Temperature of the rollouts.
        drop_dead: Whether to give dead groups the weight 0.
        processes: Number of processes that share the rows of a batch.

    Raises:
        WorkError: The trajectories need more rows than the process has, or a trajectory is too long for a row.
    """
    items = list(_list_trajectories(groups, advantages, drop_dead))
    _check_lengths(items, cfg)
    rows = _pack(items, cfg) if cfg.packing else [[item] for item in items]
    num_rows = cfg.num_rows // processes
    if len(rows) > num_rows:
        reason = "the environment or the chat template rewrites the history, and each rewrite needs another row"
        if cfg.packing:
            reason = "these trajectories are longer than in earlier batches"
        owner = "a batch" if processes == 1 else "a process"
        raise WorkError(
            f"the rollouts of {owner} have {len(items)} trajectories, which need {len(rows)} rows, "
            f"but {owner} has {num_rows} rows\n"
            f"    reason: {reason}\n    fix: set input.rows to {2 * len(rows) * processes}"
        )
    shapes = cfg.batch_shapes().items()
    arrays = {name: np.zeros((num_rows, *shape[1:]), dtype) for name, (shape, dtype) in shapes}
    arrays["temperature"][:] = temperature
    for name in {EXPERTS_ENTRY, "kept_tokens"} & arrays.keys():
        arrays[name][:] = -1
    places = _place_items(rows)
    if cfg.packing:
        for place in places:
            arrays["segment_ids"][place.row, place.begin : place.end] = place.segment
    _fill_tokens(arrays, places)
    for place in places:
        part = {name: array[place.row, place.begin : place.end] for name, array in arrays.items() if array.ndim > 2}
        if EXPERTS_ENTRY in part:
            _fill_experts(part[EXPERTS_ENTRY], place.item.trajectory)
        if "kept_tokens" in part and place.item.is_trained:
            width = part["kept_tokens"].shape[1]
            segments = [_kept_tokens(segment, width) for segment in place.item.trajectory]
            part["kept_tokens"][:] = np.concatenate(segments)[1:]
    return arrays


@attrs.frozen(eq=False)
class _Place:
    """The positions of a trajectory: `begin` to `end` of a row. It is number `segment` of the row, counted from 1."""

    item: ScoredTrajectory
    row: int
    segment: int
    begin: int
    end: int


def _place_items(rows: Sequence[Sequence[ScoredTrajectory]]) -> list[_Place]:
    places = []
    for number, row in enumerate(rows):
        begin = 0
        for segment, item in enumerate(row, 1):
            end = begin + item.num_positions
            places.append(_Place(item, number, segment, begin, end))
            begin = end
    return places


def _pack(items: Sequence[ScoredTrajectory], cfg: TaskInput.Config) -> list[list[ScoredTrajectory]]:
    """Put trajectories into as few rows as first fit finds, the longest first."""
    order = sorted(range(len(items)), key=lambda i: -items[i].num_positions)
    spans = [(i, 0, items[i].num_positions) for i in order]
    return [[items[i] for i, _, _ in row] for row in first_fit(spans, cfg.sequence_length)]


def _list_trajectories(
    groups: Sequence[Group], advantages: Sequence[Sequence[Sequence[np.ndarray]]], drop_dead: bool
) -> Iterator[ScoredTrajectory]:
    for group, group_advantages in zip(groups, advantages, strict=True):
        drops = drop_dead and group.is_dead
        for rollout, score, values in zip(group.rollouts, group.scores, group_advantages, strict=True):
            is_trained = not drops and is_usable(rollout, score)
            for trajectory, tokens in zip(rollout.trajectories, values, strict=True):
                yield ScoredTrajectory(trajectory, tokens, score.value, is_trained)


def is_usable(rollout: Rollout, score: Score) -> bool:
    """Return True if neither the environment nor the reward failed, so that the rollout can be trained on."""
    return score.error is None and rollout.finish != "error"


def _check_lengths(items: Sequence[ScoredTrajectory], cfg: TaskInput.Config) -> None:
    longest = max((item.num_positions for item in items), default=0)
    if longest > cfg.sequence_length:
        raise WorkError(
            f"a trajectory has {longest + 1} tokens\n    expected: at most input.sequence_length + 1 = {cfg.sequence_length + 1}\n"
            "    fix: raise input.sequence_length, or lower loop.policy.max_tokens"
        )


def _fill_tokens(arrays: Mapping[str, np.ndarray], places: Sequence[_Place]) -> None:
    """Write the tokens of all trajectories, and the numbers about them, into arrays of zeros, [R, S]."""
    items = [place.item for place in places]
    segments = [segment for item in items for segment in item.trajectory]
    if not segments:
        return
    sizes = np.array([sum(len(segment.tokens) for segment in item.trajectory) for item in items])
    owner = np.repeat(np.arange(len(items)), sizes)  # of each token
    position = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    source = np.flatnonzero(position < sizes[owner] - 1)  # the last token is only a target
    owner, position = owner[source], position[source]
    place = (
        np.array([place.row for place in places])[owner],
        np.array([place.begin for place in places])[owner] + position,
    )

    tokens = np.concatenate([segment.tokens for segment in segments])
    drawn = np.repeat([segment.drawn for segment in segments], [len(segment.tokens) for segment in segments])
    advantages = np.concatenate([item.advantages for item in items])
    logprobs = np.concatenate([_logprobs(segment) for segment in segments])
    is_trained = np.array([item.is_trained for item in items])[owner]
    weights = (drawn[source + 1] & is_trained).astype(np.float32)
    arrays["tokens"][place], arrays["targets"][place] = tokens[source], tokens[source + 1]
    arrays["positions"][place], arrays["weights"][place] = position, weights
    arrays["advantages"][place] = advantages[source + 1] * weights
    arrays["rollout_logprobs"][place] = np.where(is_trained, logprobs[source + 1], 0.0)

    last = np.full(len(items), -1)
    np.maximum.at(last, owner, np.where(weights > 0, place[1], -1))  # the column of the last target that is trained on
    for item, item_place, column in zip(items, places, last, strict=True):
        if column >= 0:
            arrays["rewards"][item_place.row, column] = item.reward


def _fill_experts(experts: np.ndarray, trajectory: Trajectory) -> None:
    """Write the recorded experts of a trajectory into an array [number of positions, layers, experts per token]."""
    begin = 0
    for segment in trajectory:
        recorded = segment.experts
        if recorded is not None:
            count = len(experts[begin : begin + len(recorded)])
            if recorded.shape[1:] != experts.shape[1:]:
                raise WorkError(
                    "the policy records experts that do not fit the batch\n"
                    f"    got: {recorded.shape[1]} layers with {recorded.shape[2]} experts per token\n"
                    f"    expected: input.experts = {list(experts.shape[1:])}\n"
                    "    fix: apply router-replay after the settings of the model"
                )
            experts[begin : begin + count] = recorded[:count]
        begin += len(segment.tokens)


def _logprobs(segment: Segment) -> np.ndarray:
    """Return the log-probabilities of a segment, float32 [N]. They are 0 if the policy did not draw it."""
    return np.zeros(len(segment.tokens), np.float32) if segment.logprobs is None else segment.logprobs


def _kept_tokens(segment: Segment, width: int) -> np.ndarray:
    """Return the tokens that could be drawn in place of those of a segment, int32 [N, width]. They are -1 without a record."""
    if segment.kept is None:
        return np.full((len(segment.tokens), width), -1, np.int32)
    if segment.kept.shape[1] != width:
        raise WorkError(
            "the policy records another number of tokens than a batch has room for\n"
            f"    got: loop.policy.engine.runner.kept_tokens = {segment.kept.shape[1]}\n"
            f"    expected: input.kept_tokens = {width}\n    fix: set both to the same number"
        )
    return segment.kept
