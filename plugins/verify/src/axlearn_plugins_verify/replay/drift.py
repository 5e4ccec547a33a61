"""Find what has changed since a run computed a step: its config, data, versions, devices, flags, or compiled step."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from axlearn_core.config import diff
from axlearn_core.config.kinds import DECISIVE, change_kinds
from axlearn_core.errors import CheckpointError
from axlearn_core.plugins.code_names import code_name
from axlearn_core.run.asset_copies import align_assets
from axlearn_core.run.lock import make_lock
from axlearn_core.run.record import lock_drift, short_hash, show_change
from axlearn_core.train.data_facts import check_facts
from axlearn_plugins_verify.replay.history import History

SHOWN = 12
_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=\d+\s*")


def config_drift(history: History, config: Any, step: int) -> list[str]:
    """Return the changes to the config file since the run's last attempt, which a replay must not mix into the step.

    Args:
        history: The run.
        config: Config that the step was computed with.
        step: Step to replay.
    """
    recorded = history.run.lock.get("hash")
    if not recorded or recorded == short_hash(history.config):
        return []
    saved = history.checkpoint_after(step)
    reference = config
    if saved is None and history.steps:
        reference = history.config_of(history.steps[-1])
    changes = diff(align_assets(reference, history.config), history.config, code_name)
    decisive = [c for c, kind in change_kinds(changes, reference, history.config) if kind in DECISIVE]
    lines = [f"config.yaml was edited: {show_change(change)}" for change in decisive]
    return lines or [f"config.yaml was edited: its hash was {recorded}, is {short_hash(history.config)}"]


def data_drift(run_dir: str, recorded: object, facts: Mapping[str, Any]) -> list[str]:
    """Return the changes to the data since a checkpoint."""
    return check_facts(Path(run_dir), recorded, facts, allow_drift=True)


def version_drift(lock: Mapping[str, Any], program: Any) -> list[str]:
    """Return the changes in versions, devices and flags since a lock was written.

    Distributions that were installed later do not count, because the run did not use them.
    """
    now = make_lock(program, {}, experiment="", trained_parameters=0, provenance=None)
    now["versions"] = {name: version for name, version in now["versions"].items() if name in lock.get("versions", {})}
    return lock_drift(_without_device_count(lock), _without_device_count(now))


def step_drift(lock: Mapping[str, Any], program: Any, batch: Any) -> list[str]:
    """Return a line if the compiled step changed, for example because code was edited without a new version."""
    before = lock.get("hlo_fingerprint")
    if not before or before == (now := program.fingerprint(batch)):
        return []
    return [f"the compiled step was {before}, is {now}: code that computes it changed"]


def check_drift(run: str, step: int, changes: Sequence[str], *, allow_drift: bool) -> None:
    """Raise `CheckpointError` if anything changed, unless drift is allowed."""
    if not changes or allow_drift:
        return
    more = [f"    and {len(changes) - SHOWN} more"] if len(changes) > SHOWN else []
    lines = "\n".join([*(f"    {change}" for change in changes[:SHOWN]), *more])
    raise CheckpointError(
        f"step {step:,} of {run} cannot be replayed exactly, because the run changed since\n{lines}\n"
        "    fix: restore what changed, or pass --allow-drift to compute the step with what is here"
    )


def _without_device_count(lock: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the number of virtual devices, which `devices` already contains."""
    flags = dict(lock.get("flags") or {})
    if "XLA_FLAGS" in flags:
        flags["XLA_FLAGS"] = _DEVICE_COUNT.sub("", flags["XLA_FLAGS"]).strip()
    return {**lock, "flags": {name: value for name, value in flags.items() if value}} if "flags" in lock else dict(lock)
