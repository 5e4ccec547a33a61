"""Look up machines by name, and find the mesh rule for a machine."""

import importlib
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from axlearn_core.contracts.mesh import MeshRule, TargetRule
from axlearn_core.contracts.target import Machine, Target
from axlearn_core.errors import PluginError
from axlearn_core.plugins.index import unknown_name_error
from axlearn_core.plugins.manager import Host, host


def targets(plugins: Host | None = None) -> dict[str, tuple[str, Target]]:
    """Return (plugin, target) by target name.

    Raises:
        PluginError: If two plugins claim the same name.
    """
    targets_by_name: dict[str, tuple[str, Target]] = {}
    for origin, declared in (plugins or host()).call("axlearn_targets"):
        for target in declared:
            if target.name in targets_by_name:
                raise PluginError(
                    f"the target {target.name!r} is claimed by {targets_by_name[target.name][0]} and by {origin}"
                )
            targets_by_name[target.name] = (origin, target)
    return targets_by_name


def find_machine(name: str) -> Machine:
    """Return the machine with a name such as `cpu-8`, `h100-8x64` or `tpu-v5p-1024`.

    Raises:
        RequestError: If the target is unknown or does not support the size.
    """
    targets_by_name = targets()
    fits = [t for t in targets_by_name if name == t or name.startswith(f"{t}-")]
    if not fits:
        examples = [e for _, t in targets_by_name.values() for e in (t.examples or (t.name,))]
        raise unknown_name_error("target", "targets", name, examples, "axlearn targets list")
    return targets_by_name[max(fits, key=len)][1].machine(name)


def find_config_rule(machine: Machine, config_rules: Mapping[str, TargetRule]) -> tuple[str, MeshRule] | None:
    """Return the path and the rule in `mesh.targets` with the longest matching pattern, or None if no pattern matches."""
    patterns = [p for p in config_rules if fnmatchcase(machine.name, p)]
    if not patterns:
        return None
    key = max(patterns, key=len)
    rule = config_rules[key]
    return f"mesh.targets.{key}", MeshRule(target=key, shape=rule.shape, rules=rule.rules, features=rule.features)


def find_rule(
    machine: Machine, config_rules: Mapping[str, TargetRule], count_parameters: Callable[[], int]
) -> tuple[str, MeshRule] | None:
    """Find the mesh rule for a machine.

    Args:
        machine: The machine to run on.
        config_rules: The rules of the config. They take precedence over the rules of plugins.
        count_parameters: Returns the number of parameters of the model. Called only if a rule depends on it.

    Returns:
        (title, rule), or None if there is no rule for the machine. The title names the source of the rule.

    Raises:
        PluginError: If two rules are equally specific.
    """
    if config_rule := find_config_rule(machine, config_rules):
        return config_rule
    fits = [
        (origin, rule)
        for origin, rules in host().call("axlearn_mesh_rules")
        for rule in rules
        if fnmatchcase(machine.name, rule.target)
    ]
    if any(rule.parameters != (0, float("inf")) for _, rule in fits):
        size = count_parameters()
        fits = [(origin, r) for origin, r in fits if r.parameters[0] <= size < r.parameters[1]]
    fits.sort(key=lambda f: f[1].rank, reverse=True)
    if len(fits) > 1 and fits[0][1].rank == fits[1][1].rank:
        (a, first), (b, second) = fits[:2]
        raise PluginError(
            f"two mesh rules are equally specific for {machine.name}: {first.target!r} of {a} and {second.target!r} of {b}"
        )
    return (f"mesh rule {fits[0][1].target!r} ({fits[0][0]})", fits[0][1]) if fits else None


def load(path: str) -> object:
    """Import and return the object at `"module:attribute"`."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
