"""Convert a trained run to a run with different features."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from axlearn_core.compose import Functional
from axlearn_core.compose.devices import configure_devices
from axlearn_core.config import Node
from axlearn_core.errors import CheckpointError, PluginError, RequestError
from axlearn_core.plugins.feature import Feature
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import resolve
from axlearn_core.run import Run, RunWeights
from axlearn_core.run.derive import new_directory
from axlearn_core.train.api import provenance
from axlearn_plugins_finetune.conversion.param_transfer import Params, load_bridges, transfer_params


def convert_run(
    run_dir: str | Path,
    out: str | Path,
    *,
    with_: Sequence[str] = (),
    set: Sequence[str] = (),
    step: int | None = None,
) -> None:
    """Write the run `out`: the run `run_dir` with additional features, at step 0, with a new optimizer state.

    Args:
        run_dir: A trained run, or its URI.
        out: A directory that does not exist yet.
        with_: Features, as on the command line.
        set: Settings for the new run, as on the command line.
        step: Step of the checkpoint. The default is the newest.

    Raises:
        CheckpointError: `run_dir` is not a run, or its parameters cannot be transferred. The message names the feature.
        RequestError: `out` already exists, or a feature does not fit the run.
    """
    new_directory(out)
    configure_devices(None)
    run = Run(run_dir)
    resolved = resolve(Request.from_arguments(run.weights(step).experiment, with_=with_, set=set)).check()
    config: Any = resolved.config
    bridges, reasons = load_bridges(resolved.features)

    def transfer(source: RunWeights) -> Params:
        target = Functional.from_config(config.model)
        return transfer_params(source.read(), source.functional, target, bridges, reasons=reasons, seed=config.seed)

    lock = {"features": list(with_), "provenance": provenance(resolved)}
    run.derive(out, config, transfer, step=step, new_step=0, lock=lock)


def transfer_run(run_dir: str | Path, config: Any, functional: Functional, *, step: int | None = None) -> Params:
    """Transfer the parameters of a run to a config with different features.

    A config does not record its features, so this uses the bridges of all installed features. If a feature without a bridge is
    in effect in `config` but not in the run, the error message includes the feature's reason.

    Args:
        run_dir: A trained run, or its URI.
        config: The new experiment.
        functional: The model of `config`.
        step: Step of the checkpoint. The default is the newest.

    Returns:
        Path -> array, on one device.

    Raises:
        CheckpointError: `run_dir` is not a run, or its parameters cannot be transferred. The message names the feature.
        RequestError: There is more than one process, so no process has all devices.
    """
    if jax.process_count() > 1:
        run = shlex.quote(str(run_dir))
        raise RequestError(
            f"{run_dir} is a run of a different model, and only a single process can transfer its parameters\n"
            f"    fix: run `axlearn convert {run} NEW_RUN_DIR --with ...` first, and train NEW_RUN_DIR"
        )
    source = Run(run_dir).weights(step)
    bridges, reasons = load_bridges(_installed_features(source.experiment, config))
    try:
        return transfer_params(source.read(), source.functional, functional, bridges, reasons=reasons, seed=config.seed)
    except CheckpointError as error:
        raise CheckpointError(f"{run_dir} is a run of a different model: {error}") from None


def _installed_features(old: Node[Any], new: Node[Any]) -> Iterator[tuple[str, Feature]]:
    """Yield the installed features that have a bridge, or that are only in effect in `new` and declare why they have none."""
    names = registry()
    for name in sorted(names.claims["features"]):
        try:
            feature = names.feature(name)
        except PluginError:  # a feature that cannot be loaded has no bridge
            continue
        if feature.bridge or (feature.no_bridge and _only_in(feature(), new, old)):
            yield name, feature()


def _only_in(feature: Feature, new: Node[Any], old: Node[Any]) -> bool:
    return _in_effect(feature, new) and not _in_effect(feature, old)


def _in_effect(feature: Feature, config: Node[Any]) -> bool:
    try:
        return feature.in_effect(config)
    except RequestError:  # the feature does not apply to this config
        return False
