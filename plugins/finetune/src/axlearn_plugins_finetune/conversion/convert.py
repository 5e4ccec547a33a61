"""A run with other features, made of a trained one."""

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
from axlearn_plugins_finetune.conversion.carry import Params, bridges, transfer_params


def converted(
    run_dir: str | Path,
    out: str | Path,
    *,
    with_: Sequence[str] = (),
    set: Sequence[str] = (),
    step: int | None = None,
) -> None:
    """Writes the run `out`: that of `run_dir` with more features, at step 0, with a fresh optimizer.

    Args:
        run_dir: a trained run, or the URI of one.
        out: a directory that does not exist.
        with_: features, as on the command line.
        set: settings of the new run, as on the command line.
        step: the checkpoint to take; by default the newest.

    Raises:
        CheckpointError: `run_dir` is not a run, or its parameters cannot be carried over; it says which feature is why.
        RequestError: `out` is taken, or a feature does not fit.
    """
    new_directory(out)
    configure_devices(None)
    run = Run(run_dir)
    resolved = resolve(Request.of(run.weights(step).experiment, with_=with_, set=set)).checked()
    config: Any = resolved.config
    by, reasons = bridges(resolved.features)

    def transfer(source: RunWeights) -> Params:
        target = Functional.of(config.model)
        return transfer_params(source.read(), source.functional, target, by, reasons=reasons, seed=config.seed)

    lock = {"features": list(with_), "provenance": provenance(resolved)}
    run.derive(out, config, transfer, step=step, new_step=0, lock=lock)


def carried(run_dir: str | Path, config: Any, functional: Functional, *, step: int | None = None) -> Params:
    """Transfers the parameters of a run to another config, regardless of the features that differ.

    A config does not say by which features it was made. So the bridges of all that are installed are asked, and of those
    that have none, the ones that are in effect in `config` and not in the run say why.

    Args:
        run_dir: a trained run, or the URI of one.
        config: the experiment that its parameters are for.
        functional: the model of `config`.
        step: the checkpoint to take; by default the newest.

    Returns:
        Path -> array, on one device.

    Raises:
        CheckpointError: `run_dir` is not a run, or its parameters cannot be carried over; it says which feature is why.
        RequestError: there are several processes, of which each has a part of the devices only.
    """
    if jax.process_count() > 1:
        run = shlex.quote(str(run_dir))
        raise RequestError(
            f"the parameters of {run_dir} are of another model; they are carried over by one process only\n"
            f"    fix: make the new run before, by `axlearn convert {run} NEW_RUN_DIR --with ...`, and train that"
        )
    source = Run(run_dir).weights(step)
    by, reasons = bridges(_installed_features(source.experiment, config))
    try:
        return transfer_params(source.read(), source.functional, functional, by, reasons=reasons, seed=config.seed)
    except CheckpointError as error:
        raise CheckpointError(f"{run_dir} is of another model: {error}") from None


def _installed_features(old: Node[Any], new: Node[Any]) -> Iterator[tuple[str, Feature]]:
    """Every installed feature that has a bridge, and those in effect in `new` only that say why they have none."""
    names = registry()
    for name in sorted(names.claims["features"]):
        try:
            feature = names.feature(name)
        except PluginError:  # one that cannot be loaded bridges nothing
            continue
        if feature.bridge or (feature.no_bridge and _only_in(feature(), new, old)):
            yield name, feature()


def _only_in(feature: Feature, new: Node[Any], old: Node[Any]) -> bool:
    return _in_effect(feature, new) and not _in_effect(feature, old)


def _in_effect(feature: Feature, config: Node[Any]) -> bool:
    try:
        return feature.in_effect(config)
    except RequestError:  # it finds nothing there that it could be in
        return False
