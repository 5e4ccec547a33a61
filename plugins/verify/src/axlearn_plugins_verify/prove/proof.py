"""Prove a config: shrink it, check each property, and minimize a request that fails."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import jax

from axlearn_core.compose.devices import configure_devices
from axlearn_core.compose.program import find_layout_problem
from axlearn_core.contracts.mesh import MESH_AXES
from axlearn_core.contracts.target import Target
from axlearn_core.errors import RequestError, counted, unknown
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import Resolved, resolve
from axlearn_core.plugins.targets import find_machine
from axlearn_core.train.trainer import Trainer
from axlearn_plugins_verify.prove import minimize, module_calls
from axlearn_plugins_verify.prove.case import Case
from axlearn_plugins_verify.prove.checks import FAILS, HOLDS, NOT_RUN, Check, Checks, check_property
from axlearn_plugins_verify.prove.contract import Property
from axlearn_plugins_verify.prove.helper_process import DEVICES
from axlearn_plugins_verify.prove.shrink import Shrunk, shrink

SEEDS = 2
"""Number of seeds for weights and batches."""
MESH = "mesh"
"""Name of the property that compares meshes."""


@attrs.frozen(kw_only=True)
class Proof:
    """The result of a proof.

    Attributes:
        title: Name of the experiment, with its features.
        checks: Every property with every seed, in the order of the checks.
        shrunk: The shrunk config, its meshes, and the sizes that changed.
        minimal: Smallest request for which the first property that failed still fails, or None.
        seconds: Time of the proof.
    """

    title: str
    checks: tuple[Check, ...]
    shrunk: Shrunk
    minimal: minimize.Minimal | None
    seconds: float

    @property
    def failures(self) -> tuple[Check, ...]:
        """Checks that failed."""
        return tuple(check for check in self.checks if check.status == FAILS)

    @property
    def holds(self) -> bool:
        """Whether every property that was checked holds."""
        return not self.failures

    def __repr__(self) -> str:
        passed = sum(check.status == HOLDS for check in self.checks)
        return f"Proof({self.title}, {counted(passed, 'check')} passed, {len(self.failures)} failed)"

    def _repr_html_(self) -> str:
        """Return the checks and the first failure, for notebooks."""
        from axlearn_plugins_verify.prove.proof_report import fragment

        return fragment(self)


def properties() -> dict[str, Property]:
    """Return the installed properties by name.

    Raises:
        PluginError: If a property cannot be loaded.
    """
    return {entry.name: entry.load()() for entry in registry().entries("properties")}


def select(only: Sequence[str]) -> dict[str, Property]:
    """Return the properties with the given names, or all properties if no names are given.

    Raises:
        RequestError: If a property is not installed.
    """
    installed = properties()
    for name in only:
        if name not in installed:
            raise unknown("property", name, installed)
    return {name: p for name, p in installed.items() if not only or name in only}


def prove(
    request: Request | str | Any,
    *,
    only: Sequence[str] = (),
    minutes: float = 5.0,
    seed: int = 0,
    seeds: int = SEEDS,
    mesh: Mapping[str, int] | None = None,
    jobs: int = 1,
    progress: Callable[[Check], None] = lambda check: None,
    **options: Any,
) -> Proof:
    """Check the properties of a config.

    The config is shrunk until a laptop can train it, with random weights and batches in the shapes of its input. Neither its
    data nor its tokenizer is read.

    Args:
        request: A request, the name of an experiment, a YAML file, or a config.
        only: Names of the properties to check (default: all).
        minutes: Time limit. Checks that would start after this limit are reported as not run.
        seed: First seed for the weights and batches.
        seeds: Number of seeds.
        mesh: Shape of the only mesh to check, such as `{"data": 2}` (default: meshes that together cover every axis).
        jobs: Largest number of processes that check properties at the same time. Each one checks at least four.
        progress: Called for each check, in order.
        options: Arguments of `Request.from_arguments`, if `request` is not a `Request`.

    Raises:
        RequestError: If the request is invalid, a property is unknown, or the config cannot be shrunk.
    """
    begun = time.monotonic()
    deadline = begun + 60 * minutes
    if not isinstance(request, Request):
        request = Request.from_arguments(request, **options)
    elif options:
        raise TypeError(f"a Request accepts no additional options: {', '.join(options)}")
    chosen = select(only)
    configure_devices(find_machine(f"cpu-{DEVICES}"))
    resolved = resolve_trainer(request)
    if mesh is not None:
        check_mesh(mesh, resolved)
    shrunk = shrink(resolved.config, len(jax.devices()), deadline)
    shrunk = shrunk if mesh is None else attrs.evolve(shrunk, meshes=(mesh,))
    first = Case(
        shrunk.config, original=resolved.config, meshes=shrunk.meshes, seed=seed, target=requested_target(resolved)
    )
    cases = [first, *(first.with_seed(seed + n) for n in range(1, seeds))]
    checks = Checks(cases, chosen, has_time=lambda: time.monotonic() < deadline, progress=progress).run(jobs)
    failed = next((c for c in checks if c.status == FAILS), None)
    minimal = None
    if failed is not None:

        def still_fails(other: Resolved, meshes: minimize.Meshes, located: bool) -> Check | None:
            with contextlib.nullcontext() if located else module_calls.without_location():
                return _still_fails(other, meshes or (shrunk.meshes if mesh else ()), failed, chosen[failed.name])

        meshes = shrunk.meshes if failed.name == MESH else ()
        minimal = minimize.minimize(request, resolved, still_fails, deadline=deadline + 60, meshes=meshes)
        if minimal is not None and mesh is not None and not minimal.meshes:
            minimal = attrs.evolve(minimal, meshes=meshes)
    return Proof(
        title=" with ".join(filter(None, [resolved.title, ", ".join(name for name, _ in resolved.features)])),
        checks=checks,
        shrunk=shrunk,
        minimal=minimal,
        seconds=time.monotonic() - begun,
    )


def resolve_trainer(request: Request) -> Resolved:
    """Resolve a request for the machine that it names, without looking for hardware.

    Raises:
        RequestError: If the request is invalid, or if it is not for an experiment that trains.
    """
    resolved = resolve(request)
    if not isinstance(resolved.config, Trainer.Config):
        raise RequestError(f"{resolved.title} is a {type(resolved.config).__qualname__}; expected a Trainer.Config")
    return resolved


def check_mesh(shape: Mapping[str, int], resolved: Resolved) -> None:
    """Check that a config can use a mesh, and that there are enough devices.

    Raises:
        RequestError: If an axis is unknown, if the mesh is too large, or if it does not divide the parameters and the batch.
    """
    for axis in shape:
        if axis not in MESH_AXES:
            raise unknown("mesh axis", axis, MESH_AXES)
    size, got = math.prod(shape.values()), ", ".join(f"{axis}={size}" for axis, size in shape.items())
    if not 1 < size <= len(jax.devices()):
        raise RequestError(
            f"--mesh: a proof has {len(jax.devices())} virtual devices\n"
            f"    got: {got}\n"
            f"    expected: sizes with a product of 2 to {len(jax.devices())}\n    fix: --mesh {next(iter(shape))}=2"
        )
    config: Any = resolved.config
    if problem := find_layout_problem(config, attrs.evolve(config.mesh, shape=dict(shape)), size):
        raise RequestError(
            f"--mesh: {resolved.title} cannot use this mesh\n"
            f"    got: {got}; {problem}\n"
            "    expected: axes that its mesh rules use, with sizes that divide its parameters and its batch\n"
            "    fix: omit --mesh to check every axis that it can use"
        )


def requested_target(resolved: Resolved) -> Target | None:
    """Return the hardware that a request names, or None."""
    return resolved.machine.target if resolved.machine else None


def _still_fails(other: Resolved, meshes: minimize.Meshes, failed: Check, part: Property) -> Check | None:
    """Return the check of another request if the property fails there, too."""
    shrunk = shrink(other.config, len(jax.devices()))
    case = Case(
        shrunk.config,
        original=other.config,
        meshes=meshes or shrunk.meshes,
        seed=failed.seed,
        target=requested_target(other),
    )
    check = check_property(failed.name, part, case)
    # A different kind of failure is a different problem.
    same = (check.outcome is None) == (failed.outcome is None)
    return check if check.status == FAILS and same else None


def unfinished(proof: Proof) -> Iterator[Check]:
    """Yield the checks that the time limit kept from running."""
    yield from (check for check in proof.checks if check.status == NOT_RUN)
