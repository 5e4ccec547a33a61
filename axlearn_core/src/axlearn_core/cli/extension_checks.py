"""Checks of the commands and options that plugins register, for `axlearn plugins doctor`."""

import click

from axlearn_core.cli.commands import command_line, parent
from axlearn_core.cli.extensible import ExtensibleCommand, load_command
from axlearn_core.errors import PluginError
from axlearn_core.plugins.registry import Entry


def check_command(entry: Entry) -> None:
    """Raises `PluginError` if a command cannot be loaded, or cannot be reached where its name puts it."""
    command, above = entry.load(), parent(entry.name)
    if not isinstance(command, click.Command):
        raise PluginError(f"the {entry} is not a click command, it is {command!r}")
    if isinstance(command, ExtensibleCommand) and command.name != entry.name:
        raise PluginError(
            f"the {entry} is called {command.name!r} in its code, by which its subcommands and options are found\n"
            f'    fix: @click.command("{entry.name}", cls=ExtensibleCommand)'
        )
    if above and not isinstance(load_command(above), click.Group | ExtensibleCommand):
        raise PluginError(
            f"the {entry} is below `{command_line(above)}`, which has no subcommands\n"
            f"    fix: give it a name that does not begin with {above!r} and a hyphen"
        )


def check_option(entry: Entry) -> None:
    """Raises `PluginError` if an option cannot be loaded, or if its command does not exist or takes no such options."""
    name, _, option = entry.name.partition("--")
    if not name or not option:
        raise PluginError(
            f"the {entry} names no option of a command\n    expected: COMMAND--OPTION, such as train--seed"
        )
    command = load_command(name)
    takes_request = any(parameter.name == "with_" for parameter in command.params)
    if not isinstance(command, ExtensibleCommand) or not takes_request:
        raise PluginError(f"the {entry} is for `{command_line(name)}`, which takes no options of plugins")
    command.get_params(click.Context(command))
