"""Scalars of the rollouts of a batch."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from axlearn_plugins_rl.rollout_contracts import Group, Score
from axlearn_plugins_rl.rollout_rows import is_usable


def summarize_groups(groups: Sequence[Group]) -> dict[str, float]:
    """Return the scalars to log for a batch.

    Returns:
        `reward`, its standard deviation `reward_std`, `reward_<part>` for each part, the metrics of scores and rollouts under
        their own names, `answer_length` (drawn tokens per rollout), and shares of all groups or rollouts: `dead_groups`,
        `unfinished` (stopped by a limit), `rollout_errors` and `reward_errors`. Means of rewards leave out rollouts with an error.
    """
    pairs = [pair for group in groups for pair in zip(group.rollouts, group.scores, strict=True)]
    usable = [(rollout, score) for rollout, score in pairs if is_usable(rollout, score)]
    values = [score.value for _, score in usable]
    return {
        **({"reward": float(np.mean(values)), "reward_std": float(np.std(values))} if values else {}),
        **{f"reward_{name}": value for name, value in _means(score.parts for _, score in usable).items()},
        **_means(score.metrics for _, score in usable),
        **_means(rollout.metrics for rollout, _ in pairs),
        "answer_length": float(np.mean([rollout.num_drawn for rollout, _ in pairs])),
        "dead_groups": float(np.mean([group.is_dead for group in groups])),
        "unfinished": float(np.mean([rollout.finish == "length" for rollout, _ in pairs])),
        "rollout_errors": float(np.mean([rollout.finish == "error" for rollout, _ in pairs])),
        "reward_errors": float(np.mean([_has_failed(score) for _, score in pairs])),
    }


def combine_times(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the scalars of a batch that several processes rolled out at the same time.

    Args:
        rows: Scalars of each process. The slowest one counts, except that all processes together draw
            `rollout_tokens_per_second`.
    """
    slowest = {name: max(row[name] for row in rows) for name in rows[0]}
    if "rollout_tokens_per_second" in slowest:
        tokens = sum(row["rollout_tokens_per_second"] * row["rollout_seconds"] for row in rows)
        slowest["rollout_tokens_per_second"] = tokens / slowest["rollout_seconds"]
    return slowest


def _has_failed(score: Score) -> bool:
    """Return True if the reward failed, also if the failure counts as a reward of 0."""
    return score.error is not None or score.metrics.get("reward_errors", 0.0) > 0


def mean_pass_at(groups: Sequence[Group], attempts: int, solved: float) -> float:
    """Return the mean over the groups of the unbiased estimate of pass@k (Chen et al., 2021, arXiv 2107.03374).

    Args:
        groups: Groups with at least k rollouts each. A rollout whose reward failed does not solve its example.
        attempts: The number k of attempts.
        solved: Smallest reward of a rollout that solves its example.
    """
    estimates = []
    for group in groups:
        count = len(group.scores)
        if count < attempts:
            raise ValueError(
                f"pass@{attempts} needs {attempts} rollouts per example, but {group.example.id} has {count}"
            )
        failures = sum(score.error is not None or score.value < solved for score in group.scores)
        estimates.append(1.0 - math.comb(failures, attempts) / math.comb(count, attempts))
    return float(np.mean(estimates))


def _means(records: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each value over the records that have it."""
    values: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.items():
            values.setdefault(name, []).append(float(value))
    return {name: float(np.mean(numbers)) for name, numbers in values.items()}
