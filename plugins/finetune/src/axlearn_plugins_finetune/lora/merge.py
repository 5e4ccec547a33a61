"""Merge the adapters of a run into a dense run, or export them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from axlearn_core.compose import Functional
from axlearn_core.compose.devices import configure_devices
from axlearn_core.contracts.capabilities import FreezesVariables
from axlearn_core.contracts.experiment import get_loop_config
from axlearn_core.errors import RequestError
from axlearn_core.run import Run, RunWeights
from axlearn_core.run.derive import local_target, new_directory
from axlearn_plugins_finetune.conversion import FRESH
from axlearn_plugins_finetune.lora import adapters
from axlearn_plugins_finetune.lora.feature import without_adapters
from axlearn_plugins_finetune.lora.start import StartFromRun


def bridge(path: str, shape: Sequence[int], axes: Sequence[str | None], old: Callable[[str], Any]) -> Any:
    """Initialize new adapters, so that they have no effect. See `axlearn_plugins_finetune.conversion.Bridge`."""
    return FRESH if adapters.is_adapter(path) else None


def scales_of(run: RunWeights) -> dict[str, float]:
    """Return path -> alpha / rank of each adapted map of a run."""
    return adapters.scales_of(run.functional.describe())


def changed_variables(run: RunWeights) -> list[str]:
    """Return the paths of variables that training may have changed: all variables that the learner did not freeze."""
    learned, experiment = run.functional.learned, run.experiment
    learner = experiment.learner.build(max_steps=experiment.max_steps, axes=run.functional.axes)
    frozen = learner.frozen_variables(learned) if learned and isinstance(learner, FreezesVariables) else ()
    return [path for path in run.functional.variables if path not in frozen]


def export_run(run_dir: str | Path, directory: str | Path, *, step: int | None = None) -> None:
    """Write the adapters of a run to a directory. See `adapters.save`."""
    directory = local_target(directory)
    configure_devices(None)
    source = Run(run_dir).weights(step)
    moved = changed_variables(source)
    adapters.save(directory, source.read(), scales_of(source), run=find_base(source), variables=moved)


def merge_run(run_dir: str | Path, out: str | Path, *, exported: Path | None = None, step: int | None = None) -> None:
    """Write a run of the dense model with merged adapters, at the step and data position of `run_dir`.

    The new run has no optimizer state, so its moments start at zero.

    Args:
        run_dir: A run with adapters, or its URI. If `exported` is given, the run that contains their base.
        out: The new run directory, which must be empty or missing.
        exported: Directory of exported adapters.
        step: Step of the checkpoint. The default is the newest.

    Raises:
        RequestError: There are no adapters, they were trained on a different base, or `out` already exists.
    """
    new_directory(out)
    configure_devices(None)
    run = Run(run_dir)
    source = run.weights(step)
    scales = scales_of(source)
    if not scales and exported is None:
        raise RequestError(f"{run_dir} has no adapters to merge\n    fix: use a run that was trained with lora")
    if scales and exported is not None:
        raise RequestError(f"{run_dir} already has adapters\n    fix: use the run of their base, or remove --adapters")

    dense = without_adapters(source.experiment)
    dtypes = {path: spec.dtype for path, spec in Functional.from_config(dense.model).abstract.items()}

    def merge(weights: RunWeights) -> Mapping[str, Any]:
        params = weights.read()
        # The base may be stored in a narrower dtype than the dense model, which must not round the sums.
        params |= {path: params[path].astype(dtype) for path, dtype in dtypes.items() if path in params}
        if exported is None:
            return adapters.merge(params, scales)
        adapter_export = adapters.load(exported)
        adapter_export.check(params)
        return adapters.merge({**params, **adapter_export.variables, **adapter_export.params}, adapter_export.scales)

    run.derive(out, dense, merge, step=step)


def find_base(run: RunWeights) -> str | None:
    """Return the run or URI of a run's base, or None if unknown."""
    loop = get_loop_config(run.experiment)
    if not isinstance(loop, StartFromRun.Config) or loop.run_dir is None:
        return None
    return loop.run_dir if "://" in loop.run_dir else str(Path(loop.run_dir).expanduser().absolute())
