"""Commands that plugins extend with subcommands and options through entry points."""

import difflib
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from axlearn_core.cli.commands import children, command_line, parent, plugin_commands, related_commands

if TYPE_CHECKING:
    from axlearn_core.contracts.options import CommandOption
    from axlearn_core.plugins.registry import Entry
    from axlearn_core.plugins.request import Request

_PLUGIN_VALUES = "axlearn.options"
"""Key in the `meta` of a click context. It maps each plugin option on the command line to (`CommandOption`, value)."""


class ExtensibleCommand(click.Command):
    """A command with its own action that plugins can extend with subcommands and options.

    - The entry point `NAME-WORD` in the `axlearn.commands` group adds the subcommand WORD to the command NAME. It also works
      as a flag: `axlearn plan EXPERIMENT --search` is equivalent to `axlearn plan search EXPERIMENT`.
    - The entry point `NAME--OPTION` in the `axlearn.options` group adds a `CommandOption` to the command NAME, which must
      use `request_options`.

    The click command must have the name of its entry point: `@click.command("plan-search", cls=ExtensibleCommand)`.
    """

    @property
    def entry_name(self) -> str:
        """Name of the command's entry point."""
        return self.name or ""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the words of the subcommands."""
        return list(children(self.entry_name))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a subcommand, or None if it does not exist."""
        name = children(self.entry_name).get(cmd_name)
        return load_command(name) if name else None

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's parameters, the plugin options, and --help."""
        *parameters, help_option = super().get_params(ctx)
        return [*parameters, *(_click_option(name, option) for name, option in self._plugin_options()), help_option]

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the arguments of this command, or of the subcommand selected by the first word or a flag.

        Raises:
            click.UsageError: If the arguments are invalid. The error suggests a subcommand, command, or package.
        """
        words, other_args = self._split_subcommand(args)
        if words and not extra.get("resilient_parsing"):
            self._warn_ambiguous_name(args[0])
        if words:
            name = "-".join([self.entry_name, *words])
            return load_command(name).make_context(" ".join([info_name or "", *words]), other_args, parent, **extra)
        self._check_installed(args)
        try:
            return super().make_context(info_name, list(args), parent, **extra)
        except click.NoSuchOption as error:
            raise self._unknown_option_error(error) from None
        except click.UsageError as error:
            raise self._add_hint(args, error) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Format the options and a summary of each subcommand, without importing the subcommands."""
        super().format_options(ctx, formatter)
        if subcommands := children(self.entry_name):
            from axlearn_core.cli.summaries import summary

            values = plugin_commands()
            with formatter.section("Commands"):
                formatter.write_dl([(word, summary(values[name][0]) or "") for word, name in subcommands.items()])

    def _split_subcommand(self, args: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the words of the selected subcommand and the remaining arguments."""
        if args and args[0] in children(self.entry_name):
            return [args[0]], list(args[1:])
        option_names = {name for parameter in self.params for name in parameter.opts}
        flags = [arg for arg in _before_separator(args) if arg.startswith("--") and arg not in option_names]
        words = _find_longest_path(self.entry_name, {flag[2:] for flag in flags})
        chosen = {f"--{word}" for word in words}
        return words, [arg for arg in args if arg not in chosen]

    def _warn_ambiguous_name(self, word: str) -> None:
        if word in children(self.entry_name) and _is_experiment(word):
            line = f"{command_line(self.entry_name)} -- {word}"
            click.echo(f"note: {word} is a subcommand; to use the experiment of this name: {line}", err=True)

    def _check_installed(self, args: Sequence[str]) -> None:
        from axlearn_core.plugins.index import find_package

        flags = (arg[2:] for arg in _before_separator(args) if arg.startswith("--"))
        for word in (*args[:1], *flags):
            package = find_package("commands", f"{self.entry_name}-{word}")
            if package and not _is_experiment(word):
                line = f"{command_line(self.entry_name)} {word}"
                raise click.UsageError(f"`{line}` is not installed: {package} provides it (pip install {package}).")

    def _plugin_options(self) -> list[tuple[str, "CommandOption"]]:
        """Return (`--name`, option) for each plugin option, sorted by name.

        Raises:
            PluginError: If two distributions, or a distribution and the command, define the same option.
        """
        from axlearn_core.contracts.options import CommandOption
        from axlearn_core.errors import PluginError
        from axlearn_core.plugins.registry import registry

        prefix = f"{self.entry_name}--"
        option_names = {name for parameter in self.params for name in parameter.opts}
        options = []
        for name in sorted(n for n in registry().claims["options"] if n.startswith(prefix)):
            entry, flag = registry().entry("options", name), f"--{name.removeprefix(prefix)}"
            option = entry.load()
            if not isinstance(option, CommandOption):
                raise PluginError(f"the {entry} is {option!r}, not a CommandOption")
            if flag in option_names:
                raise PluginError(
                    f"{entry.origin} registers {flag}, which is already an option of `{command_line(self.entry_name)}`"
                )
            options.append((flag, option))
        return options

    def _unknown_option_error(self, error: click.NoSuchOption) -> click.UsageError:
        """Return the error for an unknown option. It suggests commands or a package with that option, or the nearest names."""
        from axlearn_core.plugins.index import find_package

        option, line = error.option_name, command_line(self.entry_name)
        others = [name for name in related_commands(self.entry_name) if name != self.entry_name]
        if owners := [command_line(name) for name in others if option in _option_names(name)]:
            message = f"{option} is an option of {_join(owners)}, not of `{line}`."
        elif lines := [c for c in map(command_line, others) if option[2:] in c.split()[2:]]:
            message = f"{option} cannot be used with `{line}`: it selects {_join(lines)}."
        elif package := find_package("options", f"{self.entry_name}{option}"):
            message = f"{option} is not installed: {package} provides it (pip install {package})."
        else:
            names = [*_option_names(self.entry_name), *(f"--{word}" for word in children(self.entry_name))]
            return click.NoSuchOption(option, possibilities=names, ctx=error.ctx)
        return click.UsageError(message, error.ctx)

    def _add_hint(self, args: Sequence[str], error: click.UsageError) -> click.UsageError:
        """Suggest a subcommand if the first word resembles its name, or if its name comes after other words."""
        subcommands = children(self.entry_name)
        similar = difflib.get_close_matches(args[0], subcommands, n=1) if args else []
        suggestions = [*similar, *(arg for arg in args if arg in subcommands)]
        if not suggestions:
            return error
        hint = f" Did you mean: {command_line(self.entry_name)} {suggestions[0]} ...?"
        return click.UsageError(error.format_message() + hint, error.ctx)


def change_request(request: "Request") -> "Request":
    """Apply the plugin options on the command line to the request, in alphabetical order."""
    context = click.get_current_context(silent=True)
    options: dict[str, Any] = context.meta.get(_PLUGIN_VALUES, {}) if context else {}
    for _, (option, value) in sorted(options.items()):
        request = option.change(value, request)
    return request


def load_command(name: str) -> click.Command:
    """Import and return a command. Raise `PluginError` if it cannot be loaded."""
    from axlearn_core.cli.main import cli
    from axlearn_core.errors import PluginError

    command = cli.get_command(click.Context(cli), name)
    if command is None:
        raise PluginError(f"the command {name!r} does not exist")
    return command


def check_command(entry: "Entry") -> None:
    """Raise `PluginError` if a command cannot be loaded, or if its parent does not accept subcommands."""
    from axlearn_core.errors import PluginError

    command, parent_name = entry.load(), parent(entry.name)
    if not isinstance(command, click.Command):
        raise PluginError(f"the {entry} is {command!r}, not a click command")
    if isinstance(command, ExtensibleCommand) and command.name != entry.name:
        raise PluginError(
            f"the {entry} has the click name {command.name!r}, so its subcommands and options cannot be found\n"
            f'    fix: @click.command("{entry.name}", cls=ExtensibleCommand)'
        )
    if parent_name and not isinstance(load_command(parent_name), click.Group | ExtensibleCommand):
        raise PluginError(
            f"the {entry} is below `{command_line(parent_name)}`, which cannot have subcommands\n"
            f"    fix: choose a name that does not start with '{parent_name}-'"
        )


def check_option(entry: "Entry") -> None:
    """Raise `PluginError` if an option cannot be loaded, or if its command is unknown or does not accept plugin options."""
    from axlearn_core.errors import PluginError

    name, _, option = entry.name.partition("--")
    if not name or not option:
        raise PluginError(f"the name of the {entry} is invalid\n    expected: COMMAND--OPTION, such as train--seed")
    command = load_command(name)
    takes_request = any(parameter.name == "with_" for parameter in command.params)
    if not isinstance(command, ExtensibleCommand) or not takes_request:
        raise PluginError(f"the {entry} is for `{command_line(name)}`, which does not accept plugin options")
    command.get_params(click.Context(command))


def _find_longest_path(name: str, words: set[str]) -> list[str]:
    """Return the longest chain of subcommands, starting at a command, that consists of the given words."""
    paths = (
        [word, *_find_longest_path(child, words - {word})] for word, child in children(name).items() if word in words
    )
    return max(paths, key=len, default=[])


def _before_separator(args: Sequence[str]) -> list[str]:
    return list(itertools.takewhile(lambda arg: arg != "--", args))


def _is_experiment(word: str) -> bool:
    from axlearn_core.plugins.registry import registry

    return word in registry().claims["experiments"]


def _option_names(name: str) -> set[str]:
    command = load_command(name)
    parameters = command.get_params(click.Context(command))
    return {option for p in parameters if isinstance(p, click.Option) for option in p.opts}


def _click_option(name: str, option: "CommandOption") -> click.Option:
    def remember(ctx: click.Context, _parameter: click.Parameter, value: object) -> None:
        if value not in (None, False):
            ctx.meta.setdefault(_PLUGIN_VALUES, {})[name] = option, value

    kind: dict[str, Any] = {"is_flag": True} if option.metavar is None else {"metavar": option.metavar}
    declared = name, f"plugin_{name[2:].replace('-', '_')}"
    return click.Option(declared, help=option.help, expose_value=False, callback=remember, **kind)


def _join(lines: Sequence[str]) -> str:
    return " and ".join(f"`{line}`" for line in lines)
