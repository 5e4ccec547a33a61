"""Rollouts as readable JSONL files: one rollout per line, with its example, its text and its reward.

{"group": 0, "id": "7", "prompt": "2 + 2 = ", "answer": "4", "seed": 1, "text": "4", "finish": "stop", "reward": 1.0}
"""

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from axlearn_core.errors import InputError, nearest
from axlearn_core.run.record import write_whole
from axlearn_plugins_rl.prompts import check_example, content
from axlearn_plugins_rl.rollout_contracts import Example, Group, Rollout, RolloutFinish, Score, Segment, Trajectory
from axlearn_plugins_transformer.text.data_files import is_url, list_files
from axlearn_plugins_transformer.text.jsonl_rows import rows

UNSCORED = "not scored"
"""Error of the score of a record without a reward."""

EXPECTED = '{"id": "7", "prompt": "2 + 2 = ", "answer": "4", "text": "4", "reward": 1.0}'

_NUMBER, _OBJECT = (int, float), (dict,)
_TYPES: Mapping[str, tuple[type, ...]] = {
    "group": (int,),
    "id": (str,),
    "prompt": (str, list),
    "tools": (list,),
    "seed": (int,),
    "text": (str,),
    "finish": (str,),
    "error": (str,),
    "reward": _NUMBER,
    "parts": _OBJECT,
    "reward_metrics": _OBJECT,
    "reward_error": (str,),
    "metrics": _OBJECT,
    "messages": (list,),
    "trajectories": (list,),
}
"""Field of a record -> types of its value. All fields except `id` and `text` are optional."""


_NAME = re.compile(r"step-(\d+)(?:\.process-(\d+))?\.jsonl")


def file_name(step: int, process: int) -> str:
    """Return the name of the file in which a process writes the rollouts of a training step."""
    return f"step-{step}.process-{process}.jsonl" if process else f"step-{step}.jsonl"


def read_name(name: str) -> tuple[int, int] | None:
    """Return the step and the process of a file name, or None if it is not a name from `file_name`."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def _add_processes(path: Path) -> list[str]:
    """Return the path of a file of process 0 and those of the other processes for the same step, or any other path alone."""
    name = read_name(path.name)
    others = path.parent.glob(f"step-{name[0]}.process-*.jsonl") if name and not name[1] and path.is_file() else ()
    return [str(path), *map(str, others)]


def write_rollouts(
    path: Path, groups: Iterable[Group], *, step: int | None = None, tokens: bool = True, logprobs: bool = False
) -> None:
    """Write groups to a file, atomically. The folder is created if necessary.

    Args:
        path: The file.
        groups: Groups of scored rollouts.
        step: Training step of the batch, written to each record.
        tokens: Whether to write the trajectories.
        logprobs: Whether the trajectories include log-probabilities.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = map(to_line, records(groups, step=step, tokens=tokens, logprobs=logprobs))
    write_whole(path, "".join(lines), durable=False)


def records(
    groups: Iterable[Group], *, step: int | None = None, tokens: bool = True, logprobs: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the record of each rollout. See `write_rollouts`."""
    for number, group in enumerate(groups):
        for rollout, score in zip(group.rollouts, group.scores, strict=True):
            record = {} if step is None else {"step": step}
            record |= {
                "group": number,
                "id": rollout.example.id,
                **content(rollout.example),
                **_rollout_fields(rollout),
            }
            record |= _score_fields(score)
            if tokens:
                record["trajectories"] = [_segments(t, logprobs=logprobs) for t in rollout.trajectories]
            yield record


def to_line(record: Mapping[str, Any]) -> str:
    """Return a record as one line of JSON. Text is only escaped if it is not valid Unicode."""
    try:
        line = json.dumps(record, ensure_ascii=False)
        line.encode()
    except UnicodeEncodeError:
        line = json.dumps(record)
    return f"{line}\n"


def read_rollouts(path: str | Path) -> list[Group]:
    """Read the groups of a file. A group consists of consecutive records with the same example and the same `group`.

    The file `step-N.jsonl` of a training run stands for the files of all processes of the job.

    Records need an `id` and a `text`. If they have no `prompt`, the prompt is empty. If they have no `reward`, the error of the
    score is `UNSCORED`.

    Args:
        path: Path, glob or URL.

    Raises:
        InputError: There is no file, or a record is invalid. The error names its line.
    """
    rollouts: list[tuple[Any, Rollout, Score]] = []
    for file in list_files([str(path)] if is_url(str(path)) else _add_processes(Path(path))):
        for row in rows(file):
            rollout, score = _read_record(row.value, row.location)
            rollouts.append(((file.path, row.value.get("group"), rollout.example.id), rollout, score))
    groups = []
    for _, members in itertools.groupby(rollouts, key=lambda entry: entry[0]):
        _, group_rollouts, scores = zip(*members, strict=True)
        groups.append(Group(example=group_rollouts[0].example, rollouts=group_rollouts, scores=scores))
    return groups


def _rollout_fields(rollout: Rollout) -> dict[str, Any]:
    fields: dict[str, Any] = {"seed": rollout.seed, "text": rollout.text, "finish": rollout.finish}
    if rollout.error is not None:
        fields["error"] = rollout.error
    if rollout.messages:
        fields["messages"] = [dict(message) for message in rollout.messages]
    if rollout.metrics:
        fields["metrics"] = dict(rollout.metrics)
    return fields


def _score_fields(score: Score) -> dict[str, Any]:
    if score.error == UNSCORED:
        return {}
    fields: dict[str, Any] = {"reward": score.value}
    optional = {"parts": dict(score.parts), "reward_metrics": dict(score.metrics), "reward_error": score.error}
    return fields | {name: value for name, value in optional.items() if value}


def _segments(trajectory: Trajectory, *, logprobs: bool) -> list[dict[str, Any]]:
    segments = []
    for segment in trajectory:
        fields: dict[str, Any] = {"tokens": segment.tokens.tolist()}
        if segment.drawn:
            fields |= {"drawn": True, "version": segment.version}
        if logprobs and segment.logprobs is not None:
            fields["logprobs"] = _numbers(segment.logprobs)
        if logprobs and segment.model_logprobs is not None:
            fields["model_logprobs"] = _numbers(segment.model_logprobs)
        segments.append(fields)
    return segments


def _numbers(values: np.ndarray) -> list[float | None]:
    """Return the shortest numbers that give the same float32 values. JSON cannot express infinity, which becomes null."""
    return [float(str(value)) if math.isfinite(value) else None for value in values]


def _read_record(record: dict[str, Any], location: str) -> tuple[Rollout, Score]:
    _check_fields(record, location)
    finish = record.get("finish", "stop")
    if finish not in get_args(RolloutFinish):
        expected = ", ".join(get_args(RolloutFinish))
        raise InputError(f"{location}: finish is {finish!r}\n    expected: one of {expected}")
    rollout = Rollout(
        example=_read_example(record, location),
        seed=record.get("seed", 0),
        trajectories=_read_trajectories(record, location),
        text=record["text"],
        messages=tuple(record.get("messages") or ()),
        finish=finish,
        error=record.get("error"),
        metrics=record.get("metrics") or {},
    )
    if record.get("reward") is None:
        return rollout, Score(value=0.0, error=UNSCORED)
    score = Score(
        value=float(record["reward"]),
        parts=record.get("parts") or {},
        metrics=record.get("reward_metrics") or {},
        error=record.get("reward_error"),
    )
    return rollout, score


def _check_fields(record: Mapping[str, Any], location: str) -> None:
    for name in ("id", "text"):
        if name not in record:
            close = nearest(name, record)
            raise InputError(
                f"{location}: has no field {name!r}; its fields: {', '.join(record) or 'none'}"
                + (f"\n    nearest: {', '.join(close)}" if close else "")
                + f"\n    expected: {EXPECTED}"
            )
    for name, value in record.items():
        types = _TYPES.get(name)
        optional = value is None and name not in ("id", "text")
        if types is not None and not optional and (not isinstance(value, types) or isinstance(value, bool)):
            expected = " or ".join(kind.__name__ for kind in types)
            raise InputError(f"{location}: {name} is a {type(value).__name__}\n    expected: {expected}")


def _read_example(record: Mapping[str, Any], location: str) -> Example:
    prompt = record.get("prompt") or ""
    example = Example(
        id=record["id"],
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        answer=record.get("answer"),
        tools=tuple(record.get("tools") or ()),
    )
    return check_example(example, location) if prompt else example


def _read_trajectories(record: Mapping[str, Any], location: str) -> tuple[Trajectory, ...]:
    try:
        return tuple(tuple(map(_read_segment, segments)) for segments in record.get("trajectories") or ())
    except (TypeError, ValueError, KeyError, OverflowError, AttributeError):
        raise InputError(
            f"{location}: trajectories cannot be read\n    got: {repr(record['trajectories'])[:80]}\n"
            '    expected: lists of segments, such as {"tokens": [5, 9], "drawn": true}'
        ) from None


def _read_segment(fields: Mapping[str, Any]) -> Segment:
    drawn = bool(fields.get("drawn", False))
    return Segment(
        tokens=np.array(fields["tokens"], np.int32),
        drawn=drawn,
        logprobs=_read_numbers(fields.get("logprobs")),
        model_logprobs=_read_numbers(fields.get("model_logprobs")),
        version=fields.get("version"),
    )


def _read_numbers(values: Sequence[float | None] | None) -> np.ndarray | None:
    return None if values is None else np.array(values, np.float32)
