"""Retention of checkpoints, and cleanup of unfinished saves."""

import json
import logging
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from axlearn_core.checkpoint.manifest import MANIFEST, Checkpoints, Manifest
from axlearn_core.checkpoint.storage import LocalStorage
from axlearn_core.contracts.storage import Storage
from axlearn_core.errors import StorageError

log = logging.getLogger(__name__)

START_MARKER = "begun.json"
"""First file of a save. It names the run that owns the save."""


def list_expired_steps(cfg: Any, manifests: Mapping[int, Manifest]) -> list[int]:
    """Return the steps that no `keep_` field of a checkpointer's config selects.

    Args:
        cfg: Config with `keep_last` (not None), `keep_every`, `keep_best`, `best_metric`, and `best_mode`.
        manifests: Manifests of this run's checkpoints by step.
    """
    steps = sorted(manifests)
    keep = set(steps[-cfg.keep_last :])
    if cfg.keep_every is not None:
        keep |= {s for s in steps if s % cfg.keep_every == 0}
    ranks = rank_steps(cfg, manifests)
    keep |= set(sorted(ranks, key=lambda s: ranks[s], reverse=True)[: cfg.keep_best])
    return [s for s in steps if s not in keep]


def rank_steps(cfg: Any, manifests: Mapping[int, Manifest]) -> dict[int, tuple[float, int]]:
    """Rank checkpoints by `best_metric`. Larger ranks are better, and earlier steps win ties.

    Returns:
        The ranks of steps that have the metric, by step. Empty if `keep_best` is 0.
    """
    if not cfg.keep_best:
        return {}
    values = {s: m.metrics.get(cfg.best_metric) for s, m in manifests.items()}
    numbers = {s: v for s, v in values.items() if v is not None and not math.isnan(v)}
    if not numbers:
        log.warning("no checkpoint has the metric %r for checkpointer.keep_best", cfg.best_metric)
    return {s: (-v if cfg.best_mode == "min" else v, -s) for s, v in numbers.items()}


def is_created_by(storage: Storage, folder: str, names: Sequence[str], run: str) -> bool:
    """Return True if a save by `run` created the folder that contains `names`."""
    if START_MARKER not in names:
        return False
    try:
        return json.loads(storage.read(f"{folder}/{START_MARKER}")).get("run") == run
    except (StorageError, ValueError):
        return False


def clear_staging(place: Checkpoints, step: int, run: str) -> None:
    """Empty the staging folder of a step.

    Raises:
        StorageError: If the folder contains files from a different run.
    """
    storage, target = place.storage, f"{place.folder}{step}"
    folder = storage.staging(target)
    names = storage.list_names(f"{folder}/")
    if names and folder == target and not is_created_by(storage, folder, names, run):
        raise StorageError(f"{folder} contains files that do not belong to this run, such as {folder}/{names[0]}")
    if names:
        storage.delete(folder)


def remove_unfinished(place: Checkpoints, run: str) -> None:
    """Delete the files of interrupted saves and deletions of `run`."""
    storage, folder = place.storage, place.folder
    if isinstance(storage, LocalStorage):
        for path in storage.directory().glob(".*"):
            if re.fullmatch(r"\.\d+\.(partial|deleted)", path.name):
                storage.delete(path.name)
        return
    for name in storage.list_names(folder):
        if name.isdecimal():
            inside = storage.list_names(f"{folder}{name}/")
            if MANIFEST not in inside and is_created_by(storage, f"{folder}{name}", inside, run):
                storage.delete(f"{folder}{name}")


def set_aside(place: Checkpoints, steps: Iterable[int], restored: int) -> None:
    """Rename the checkpoints from later steps after a run has been rolled back to step `restored`."""
    for step in steps:
        aside = f"{place.folder}{step}.superseded-{int(time.time())}"
        place.storage.commit(f"{place.folder}{step}", aside)
        log.warning(
            "the run continues from step %d: renamed the checkpoint of step %d to %s in %s",
            *(restored, step, aside, place.name),
        )
