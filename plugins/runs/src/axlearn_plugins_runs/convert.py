"""A run with other features, made of a trained one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axlearn_core.compose import Functional
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import resolve
from axlearn_core.train.api import provenance
from axlearn_plugins_runs.carry import bridges, carry
from axlearn_plugins_runs.runs import check_new, config_of, restored, write_run


def converted(
    run_dir: Path, out: Path, *, with_: Sequence[str] = (), set: Sequence[str] = (), step: int | None = None
) -> None:
    """Writes the run `out`: that of `run_dir` with more features, at step 0, with a fresh optimizer.

    Args:
        run_dir: a trained run.
        out: a directory that does not exist.
        with_: features, as on the command line.
        set: settings of the new run, as on the command line.
        step: the checkpoint to take; by default the newest.

    Raises:
        CheckpointError: `run_dir` is no run, or its parameters cannot be carried over; it says which feature is why.
        RequestError: `out` is taken, or a feature does not fit.
    """
    check_new(out)
    resolved = resolve(Request.of(config_of(run_dir), with_=with_, set=set)).checked()
    config: Any = resolved.config
    found = restored(run_dir, step)
    by, reasons = bridges(resolved.features)
    target = Functional.of(config.model)
    params = carry(found.params, found.functional, target, by, reasons=reasons, seed=config.seed)
    write_run(out, config, params, found, step=0, lock={"features": list(with_), "provenance": provenance(resolved)})
