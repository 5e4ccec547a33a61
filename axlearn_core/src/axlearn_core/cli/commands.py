"""Names of all commands, from the core and from plugins. This module does not import the commands.

The name of a command determines its parent: `checkpoint-list` is `axlearn checkpoint list`, because `checkpoint` is a command.
"""

import functools
import os
import sys
from collections.abc import Mapping, Sequence

# Name of each built-in command -> (location, line in `axlearn --help`).
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("axlearn_core.cli.train:train", "Train an experiment, or resume its run."),
    "bench": ("axlearn_core.cli.groups:bench", "Measure training steps, or a running server."),
    "checkpoint": ("axlearn_core.cli.groups:checkpoint", "List, inspect and convert checkpoints."),
    "config": ("axlearn_core.cli.config:config", "Show, compare, explain and check configs."),
    "experiments": ("axlearn_core.cli.listing:experiments", "List the installed experiments."),
    "features": ("axlearn_core.cli.listing:features", "List the installed features, or describe one."),
    "plugins": ("axlearn_core.cli.listing:plugins", "List, check and create plugins."),
}


def plugin_commands() -> Mapping[str, tuple[str, str]]:
    """Return (entry-point value, distribution and version) for each plugin command, by name."""
    return _plugin_commands(tuple(sys.path), os.environ.get("AXLEARN_PLUGINS", ""))


@functools.lru_cache(maxsize=1)
def _plugin_commands(path: Sequence[str], block: str) -> Mapping[str, tuple[str, str]]:
    if block:
        from axlearn_core.plugins.registry import registry

        entries = {name: claims[0] for name, claims in registry().claims["commands"].items()}
        return {name: (entry.value, entry.origin) for name, entry in entries.items()}
    # Do not import the registry: importing it would double the time that `--help` takes.
    from axlearn_core.plugins.index import entry_points

    points = entry_points().select(group="axlearn.commands")
    return {p.name: (p.value, f"{p.dist.name} {p.dist.version}" if p.dist else "") for p in points}


def parent(name: str) -> str | None:
    """Return the parent of a command, or None for a top-level command.

    The parent is the longest prefix of the name that is a command.
    """
    from axlearn_core.plugins.index import read_packages

    names = {*COMMANDS, *plugin_commands(), *read_packages("commands")}  # includes commands that are not installed
    parts = name.split("-")
    prefixes = ("-".join(parts[:size]) for size in range(len(parts) - 1, 0, -1))
    return next((prefix for prefix in prefixes if prefix in names), None)


def children(name: str) -> dict[str, str]:
    """Return the direct subcommands that plugins add: the full name of each, keyed by its last word."""
    names = sorted(n for n in plugin_commands() if n.startswith(f"{name}-") and parent(n) == name)
    return {n.removeprefix(f"{name}-"): n for n in names}


def related_commands(name: str) -> list[str]:
    """Return the top-level ancestor of a command and all plugin commands below it."""
    while ancestor := parent(name):
        name = ancestor
    return [name, *sorted(n for n in plugin_commands() if n.startswith(f"{name}-") and parent(n))]


def command_line(name: str) -> str:
    """Return a command as the user types it, such as `axlearn checkpoint list`."""
    prefix = parent(name)
    return f"{command_line(prefix)} {name.removeprefix(f'{prefix}-')}" if prefix else f"axlearn {name}"
