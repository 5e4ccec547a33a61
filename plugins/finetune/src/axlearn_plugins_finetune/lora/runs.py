"""Adapters of whole runs: a run merged into a dense one, or its adapters exported."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from axlearn_core.checkpoint import RunWeights
from axlearn_core.contracts.capabilities import FreezesVariables
from axlearn_core.errors import RequestError
from axlearn_plugins_finetune.lora import adapters
from axlearn_plugins_finetune.lora.feature import without_adapters
from axlearn_plugins_finetune.lora.start import StartFromRun
from axlearn_plugins_finetune.runs import FRESH, check_new, local_target, open_run, write_run


def bridge(path: str, shape: Sequence[int], axes: Sequence[str | None], old: Callable[[str], Any]) -> Any:
    """New adapters are initialised, which makes them add nothing; see `axlearn_plugins_finetune.runs.Bridge`."""
    return FRESH if adapters.is_adapter(path) else None


def scales_of(run: RunWeights) -> dict[str, float]:
    """alpha / rank of each adapted map of a run."""
    return adapters.scales_of(run.functional.describe())


def moved_variables(run: RunWeights) -> list[str]:
    """The paths of the model's variables that training changed: all but those that the run's learner froze."""
    learned, experiment = run.functional.learned, run.experiment
    learner = experiment.learner.build(max_steps=experiment.max_steps, axes=run.functional.axes)
    frozen = learner.frozen_variables(learned) if learned and isinstance(learner, FreezesVariables) else ()
    return [path for path in run.functional.variables if path not in frozen]


def export_run(run_dir: str | Path, directory: str | Path, *, step: int | None = None) -> None:
    """Writes the adapters of a run on their own; see `adapters.save`."""
    directory = local_target(directory)
    source = open_run(run_dir, step)
    moved = moved_variables(source)
    adapters.save(directory, source.read(), scales_of(source), run=base_of(source), variables=moved)


def merge_run(run_dir: str | Path, out: str | Path, *, exported: Path | None = None, step: int | None = None) -> None:
    """Writes a run of the dense model, with the adapters in its weights, at the step and data position of `run_dir`.

    It has no optimizer state yet: its moments begin at zero.

    Args:
        run_dir: a run with adapters, or the URI of one; with `exported`, the run that they were trained from.
        out: the new run directory, which must not hold anything.
        exported: a directory of exported adapters.
        step: which checkpoint of `run_dir`; by default the newest.

    Raises:
        RequestError: there is nothing to merge, the adapters are of another base, or `out` is taken.
    """
    out = local_target(out)
    check_new(out)
    source = open_run(run_dir, step)
    scales = scales_of(source)
    if not scales and exported is None:
        raise RequestError(f"{run_dir} has no adapters to merge\n    fix: give a run that was trained with lora")
    if scales and exported is not None:
        raise RequestError(
            f"{run_dir} has adapters of its own\n    fix: give the run of their base, or leave --adapters out"
        )
    params = source.read()
    if exported is not None:
        adapter_export = adapters.load(exported)
        adapter_export.check(params)
        params, scales = {**params, **adapter_export.variables, **adapter_export.params}, adapter_export.scales
    write_run(out, without_adapters(source.experiment), adapters.merge(params, scales), source)


def base_of(run: RunWeights) -> str | None:
    """Where a run with adapters got its other parameters from."""
    loop = getattr(run.experiment, "loop", None)
    if not isinstance(loop, StartFromRun.Config) or loop.run_dir is None:
        return None
    return loop.run_dir if "://" in loop.run_dir else str(Path(loop.run_dir).expanduser().absolute())
