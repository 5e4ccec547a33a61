"""Which checkpoints may be deleted: those that a policy does not keep, and what a save of this run left unfinished."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from axlearn_core.checkpoint.manifest import Manifest
from axlearn_core.contracts.storage import Storage
from axlearn_core.errors import StorageError

log = logging.getLogger(__name__)

BEGUN = "begun.json"
"""The first file of a save: whose it is."""


def unwanted_steps(cfg: Any, manifests: Mapping[int, Manifest]) -> list[int]:
    """The steps that none of the `keep_` fields of a checkpointer's config wants.

    Args:
        cfg: with `keep_last` (not None), `keep_every`, `keep_best`, `best_metric` and `best_mode`.
        manifests: of the run's own checkpoints.
    """
    steps = sorted(manifests)
    keep = set(steps[-cfg.keep_last :])
    if cfg.keep_every is not None:
        keep |= {s for s in steps if s % cfg.keep_every == 0}
    if cfg.keep_best:
        values = {s: manifests[s].metrics.get(cfg.best_metric) for s in steps}
        numbers = {s: v for s, v in values.items() if v is not None and not math.isnan(v)}
        scored = [(v if cfg.best_mode == "min" else -v, s) for s, v in numbers.items()]
        if not scored:
            log.warning("no checkpoint has the metric %r that checkpointer.keep_best goes by", cfg.best_metric)
        keep |= {s for _, s in sorted(scored)[: cfg.keep_best]}
    return [s for s in steps if s not in keep]


def begun_by(storage: Storage, folder: str, files: Sequence[str], run: str) -> bool:
    """Whether a save of the run `run` began to write the folder with the paths `files`."""
    if (begun := f"{folder}/{BEGUN}") not in files:
        return False
    try:
        return json.loads(storage.read(begun)).get("run") == run
    except (StorageError, ValueError):
        return False
