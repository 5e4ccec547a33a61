"""Which checkpoints a policy does not keep."""

import logging
from collections.abc import Mapping
from typing import Any

from axlearn_core.checkpoint.manifest import Manifest

log = logging.getLogger(__name__)


def unwanted_steps(cfg: Any, manifests: Mapping[int, Manifest]) -> list[int]:
    """The steps that none of the `keep_` fields of a checkpointer's config wants.

    Args:
        cfg: with `keep_last` (not None), `keep_every`, `keep_best`, `best_metric` and `best_mode`.
        manifests: of the run's own checkpoints.
    """
    known = sorted(manifests)
    keep = set(known[-cfg.keep_last :])
    if cfg.keep_every is not None:
        keep |= {s for s in known if s % cfg.keep_every == 0}
    if cfg.keep_best:
        values = {s: manifests[s].metrics.get(cfg.best_metric) for s in known}
        scored = [(v if cfg.best_mode == "min" else -v, s) for s, v in values.items() if v is not None]
        if not scored:
            log.warning("no checkpoint has the metric %r that checkpointer.keep_best goes by", cfg.best_metric)
        keep |= {s for _, s in sorted(scored)[: cfg.keep_best]}
    return [s for s in known if s not in keep]
