"""Rows of a training batch from rollouts, their scores and their advantages.

Shapes: R rows, S positions per row.
"""

from collections.abc import Iterator, Sequence

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
            reason = "the trajectories are longer than those of earlier batches"
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
    for number, row in enumerate(rows):
        begin = 0
        for segment, item in enumerate(row, 1):
            end = begin + item.num_positions
            part = {name: array[number, begin:end] for name, array in arrays.items() if array.ndim > 1}
            if cfg.packing:
                part["segment_ids"][:] = segment
            _fill(part, item)
            begin = end
    return arrays


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


def _fill(part: dict[str, np.ndarray], item: ScoredTrajectory) -> None:
    """Write a trajectory into arrays of zeros, [number of positions]."""
    tokens = np.concatenate([np.asarray(s.tokens, np.int32) for s in item.trajectory])
    part["tokens"][:], part["targets"][:] = tokens[:-1], tokens[1:]
    part["positions"][:] = np.arange(item.num_positions)
    if EXPERTS_ENTRY in part:
        _fill_experts(part[EXPERTS_ENTRY], item.trajectory)
    if not item.is_trained:
        return
    drawn = np.concatenate([np.full(len(s.tokens), s.drawn) for s in item.trajectory])
    weights = drawn[1:].astype(np.float32)
    part["weights"][:] = weights
    part["advantages"][:] = np.asarray(item.advantages, np.float32)[1:] * weights
    part["rollout_logprobs"][:] = np.concatenate([_logprobs(s) for s in item.trajectory])[1:]
    if "kept_tokens" in part:
        part["kept_tokens"][:] = np.concatenate(
            [_kept_tokens(s, part["kept_tokens"].shape[1]) for s in item.trajectory]
        )[1:]
    if weights.any():
        part["rewards"][np.flatnonzero(weights)[-1]] = item.reward


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
