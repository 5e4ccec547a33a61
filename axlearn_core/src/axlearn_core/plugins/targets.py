"""Machines by name, and the mesh rule that holds on one."""

import importlib
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from axlearn_core.contracts.mesh import MeshRule, TargetRule
from axlearn_core.contracts.target import Machine, Target
from axlearn_core.errors import PluginError
from axlearn_core.plugins.index import not_known
from axlearn_core.plugins.manager import Host, host


def targets(plugins: Host | None = None) -> dict[str, tuple[str, Target]]:
    """Name -> (the plugin that knows it, the target); raises `PluginError` where two claim one name."""
    targets_by_name: dict[str, tuple[str, Target]] = {}
    for origin, declared in (plugins or host()).answers("axlearn_targets"):
        for target in declared:
            if target.name in targets_by_name:
                raise PluginError(
                    f"the target {target.name!r} is claimed by {targets_by_name[target.name][0]} and by {origin}"
                )
            targets_by_name[target.name] = (origin, target)
    return targets_by_name


def find_machine(name: str) -> Machine:
    """What a name such as `cpu-8`, `h100-8x64` or `tpu-v5p-1024` means.

    Raises:
        RequestError: no target has that name, or the size is none of its sizes.
    """
    targets_by_name = targets()
    fits = [t for t in targets_by_name if name == t or name.startswith(f"{t}-")]
    if not fits:
        examples = [e for _, t in targets_by_name.values() for e in (t.examples or (t.name,))]
        raise not_known("target", "targets", name, examples, "axlearn targets list")
    return targets_by_name[max(fits, key=len)][1].machine(name)


def find_own_rule(machine: Machine, own: Mapping[str, TargetRule]) -> tuple[str, MeshRule] | None:
    """The rule of `mesh.targets` with the longest pattern that fits the machine, and its path; None if none fits."""
    patterns = [p for p in own if fnmatchcase(machine.name, p)]
    if not patterns:
        return None
    key = max(patterns, key=len)
    rule = own[key]
    return f"mesh.targets.{key}", MeshRule(target=key, shape=rule.shape, rules=rule.rules, features=rule.features)


def find_rule(machine: Machine, own: Mapping[str, TargetRule], count: Callable[[], int]) -> tuple[str, MeshRule] | None:
    """Who says how to lay out a program on a machine, and how; None where nobody says anything.

    Args:
        machine: where it will run.
        own: the rules of the config, which go before all others.
        count: the model's number of parameters; called only where a rule asks for it.

    Raises:
        PluginError: two rules are equally specific.
    """
    if own_rule := find_own_rule(machine, own):
        return own_rule
    fits = [
        (origin, rule)
        for origin, rules in host().answers("axlearn_mesh_rules")
        for rule in rules
        if fnmatchcase(machine.name, rule.target)
    ]
    if any(rule.parameters != (0, float("inf")) for _, rule in fits):
        size = count()
        fits = [(origin, r) for origin, r in fits if r.parameters[0] <= size < r.parameters[1]]
    fits.sort(key=lambda f: f[1].rank, reverse=True)
    if len(fits) > 1 and fits[0][1].rank == fits[1][1].rank:
        (a, first), (b, second) = fits[:2]
        raise PluginError(
            f"two mesh rules are equally specific for {machine.name}: {first.target!r} of {a} and {second.target!r} of {b}"
        )
    return (f"mesh rule {fits[0][1].target!r} ({fits[0][0]})", fits[0][1]) if fits else None


def load(path: str) -> object:
    """What `"module:attribute"` names."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
