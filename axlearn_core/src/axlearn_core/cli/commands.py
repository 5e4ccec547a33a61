"""The commands by name: those of the core, and those that plugins register. Imports none of them.

A name says where a command stands: `checkpoint-list` is `axlearn checkpoint list`, because `checkpoint` is a command.
"""

import functools
import os
import sys
from collections.abc import Mapping, Sequence

# A built-in command: where it is, and its line in `axlearn --help`.
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("axlearn_core.cli.train:train", "Train an experiment, or resume its run."),
    "bench": ("axlearn_core.cli.groups:bench", "Measure a training step on this machine, or a server at an address."),
    "checkpoint": ("axlearn_core.cli.groups:checkpoint", "List, inspect and convert checkpoints."),
    "config": ("axlearn_core.cli.config:config", "Show, compare, explain and check configs."),
    "experiments": ("axlearn_core.cli.listing:experiments", "List the experiments that are installed."),
    "features": ("axlearn_core.cli.listing:features", "List features, and show what one does."),
    "plugins": ("axlearn_core.cli.listing:plugins", "List and examine what is installed."),
}


def plugin_commands() -> Mapping[str, tuple[str, str]]:
    """Name -> (what the entry point names, its distribution and version), of each command of a plugin."""
    return _plugin_commands(tuple(sys.path), os.environ.get("AXLEARN_PLUGINS", ""))


@functools.lru_cache(maxsize=1)
def _plugin_commands(path: Sequence[str], block: str) -> Mapping[str, tuple[str, str]]:
    if block:
        from axlearn_core.plugins.registry import registry

        entries = {name: claims[0] for name, claims in registry().claims["commands"].items()}
        return {name: (entry.value, entry.origin) for name, entry in entries.items()}
    # Not from the registry, whose imports would take as long again as all of `--help`.
    from axlearn_core.plugins.index import entry_points

    points = entry_points().select(group="axlearn.commands")
    return {p.name: (p.value, f"{p.dist.name} {p.dist.version}" if p.dist else "") for p in points}


def parent(name: str) -> str | None:
    """The command that a command is below: the longest beginning of its name that is a command; None at the top."""
    from axlearn_core.plugins.index import packages_of

    names = {*COMMANDS, *plugin_commands(), *packages_of("commands")}  # also those of packages that are not installed
    parts = name.split("-")
    prefixes = ("-".join(parts[:size]) for size in range(len(parts) - 1, 0, -1))
    return next((prefix for prefix in prefixes if prefix in names), None)


def children(name: str) -> dict[str, str]:
    """Word -> name of each command of a plugin right below a command, by word."""
    names = sorted(n for n in plugin_commands() if n.startswith(f"{name}-") and parent(n) == name)
    return {n.removeprefix(f"{name}-"): n for n in names}


def family(name: str) -> list[str]:
    """The command at the top of a command, and all that are below that one."""
    while above := parent(name):
        name = above
    return [name, *sorted(n for n in plugin_commands() if n.startswith(f"{name}-") and parent(n))]


def command_line(name: str) -> str:
    """How the command line spells a command: `axlearn checkpoint list`."""
    above = parent(name)
    return f"{command_line(above)} {name.removeprefix(f'{above}-')}" if above else f"axlearn {name}"
