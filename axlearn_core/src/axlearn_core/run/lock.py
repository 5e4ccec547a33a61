"""The lock of a run, which records the versions, devices, flags, data, and kernels that the run used."""

import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import importlib_metadata

from axlearn_core.compose import Program
from axlearn_core.plugins.decisions import Decision
from axlearn_core.run.record import short_hash

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tokenizers", "numpy")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Environment variables that affect compilation."""


def versions() -> dict[str, str]:
    """Return the versions of the libraries that affect results, and of all installed distributions of this framework."""
    result = {}
    for dist in importlib_metadata.distributions():
        name = dist.metadata["Name"]
        plugin = any(ep.group.startswith("axlearn.") for ep in dist.entry_points)
        if name in LIBRARIES or plugin:
            result.setdefault(name, dist.version)  # the first one on the path is imported
    return dict(sorted(result.items()))


def make_lock(
    program: Program,
    facts: Mapping[str, Any],
    *,
    experiment: str,
    trained_parameters: int,
    provenance: Mapping[str, Any] | None,
    decisions: Sequence[Decision] = (),
) -> dict[str, Any]:
    """Return the lock without facts that require compilation (kernels, fingerprint).

    Args:
        program: Program of the run.
        facts: Facts about the data.
        experiment: Name of the experiment.
        trained_parameters: Number of the model's parameters that training updates.
        provenance: Source of each config value.
        decisions: Decisions made for the user.
    """
    devices = program.layout.mesh.devices
    return {
        "experiment": experiment,
        "hash": short_hash(program.config),  # type: ignore[arg-type]
        "versions": versions(),
        "python": platform.python_version(),
        "platform": devices.flat[0].platform,
        "devices": f"{devices.size} x {devices.flat[0].device_kind}",
        "mesh": {k: v for k, v in program.layout.mesh.shape.items() if v > 1},
        "flags": {**{k: os.environ[k] for k in FLAGS if os.environ.get(k)}, **program.compiler_options},
        "parameters": program.functional.num_parameters,
        "trained_parameters": trained_parameters,
        "data": dict(facts),
        "decisions": [attrs.asdict(decision) for decision in decisions],
        "provenance": dict(provenance or {}),
    }


def peak_flops(program: Program) -> float | None:
    """Return the combined dense bfloat16 peak of all devices, in FLOP/s, or None if no plugin recognizes the hardware."""
    peak = program.target.peak_flops.get("bfloat16") if program.target else None
    return peak * program.layout.mesh.size if peak else None
