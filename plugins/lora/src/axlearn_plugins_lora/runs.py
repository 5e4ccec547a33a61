"""Adapters of whole runs: a run merged into a dense one, or its adapters exported."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from axlearn_core.errors import RequestError
from axlearn_plugins_lora import adapters
from axlearn_plugins_lora.feature import without_adapters
from axlearn_plugins_runs import FRESH, Restored, check_new, restored, write_run


def bridge(path: str, shape: Sequence[int], axes: Sequence[str | None], old: Callable[[str], Any]) -> Any:
    """New adapters are initialised, which makes them add nothing; see `axlearn_plugins_runs.Bridge`."""
    return FRESH if adapters.is_adapter(path) else None


def scales_of(run: Restored) -> dict[str, float]:
    """alpha / rank of each adapted map of a run."""
    return adapters.scales_of(run.functional.describe())


def export_run(run_dir: Path, directory: Path, *, step: int | None = None) -> None:
    """Writes the adapters of a run on their own; see `adapters.save`."""
    found = restored(run_dir, step)
    adapters.save(directory, found.params, scales_of(found))


def merge_run(run_dir: Path, out: Path, *, exported: Path | None = None, step: int | None = None) -> None:
    """Writes a run of the dense model, with the adapters in its weights, at the step and data position of `run_dir`.

    It has no optimizer state yet: its moments begin at zero.

    Args:
        run_dir: a run with adapters; with `exported`, the run that they were trained from.
        out: the new run directory, which must not hold anything.
        exported: a directory of exported adapters.
        step: which checkpoint of `run_dir`; by default the newest.

    Raises:
        RequestError: there is nothing to merge, the adapters are of another base, or `out` is taken.
    """
    check_new(out)
    found = restored(run_dir, step)
    params, scales = found.params, scales_of(found)
    if exported is not None:
        if scales:
            raise RequestError(
                f"{run_dir} has adapters of its own\n    fix: give the run of their base, or leave --adapters out"
            )
        given = adapters.load(exported)
        given.check(params)
        params, scales = {**params, **given.params}, given.scales
    if not scales:
        raise RequestError(f"{run_dir} has no adapters to merge\n    fix: give a run that was trained with lora")
    write_run(out, without_adapters(found.config), adapters.merge(params, scales), found)
