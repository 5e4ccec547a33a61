"""Commands that plugins extend through entry points: with commands below them, and with options of their own."""

import difflib
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from axlearn_core.cli.commands import children, command_line, family, parent, plugin_commands

if TYPE_CHECKING:
    from axlearn_core.contracts.options import CommandOption
    from axlearn_core.plugins.registry import Entry
    from axlearn_core.plugins.request import Request

_GIVEN = "axlearn.options"
"""Key of a click context's `meta`: option -> (the `CommandOption`, its value), of the options of plugins that were given."""


class ExtensibleCommand(click.Command):
    """A command that does a job by itself, and that plugins extend.

    - The entry point `NAME-WORD` in the group `axlearn.commands` is the subcommand WORD of the command NAME. It also works as a
      flag: `axlearn plan EXPERIMENT --search` is another spelling of `axlearn plan search EXPERIMENT`.
    - The entry point `NAME--OPTION` in the group `axlearn.options` is a `CommandOption` of the command NAME, which must use
      `request_options`.

    A click command has the name of its entry point: `@click.command("plan-search", cls=ExtensibleCommand)`.
    """

    @property
    def entry_name(self) -> str:
        """The name of the command's entry point."""
        return self.name or ""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The words of the subcommands."""
        return list(children(self.entry_name))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the subcommand of a word; None if there is none."""
        name = children(self.entry_name).get(cmd_name)
        return load_command(name) if name else None

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The parameters of the command, then the options of plugins, then --help."""
        *own, help_option = super().get_params(ctx)
        return [*own, *(_click_option(name, option) for name, option in self._plugin_options()), help_option]

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parses the arguments of this command, or those of the subcommand that the first word or a flag names.

        Raises:
            click.UsageError: as click does, with the subcommand, command or package that was probably meant.
        """
        words, rest = self._split(args)
        if words and not extra.get("resilient_parsing"):
            self._note_experiment(args[0])
        if words:
            name = "-".join([self.entry_name, *words])
            return load_command(name).make_context(" ".join([info_name or "", *words]), rest, parent, **extra)
        self._check_installed(args)
        try:
            return super().make_context(info_name, list(args), parent, **extra)
        except click.NoSuchOption as error:
            raise self._no_such_option(error) from None
        except click.UsageError as error:
            raise self._with_hint(args, error) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options, then the subcommands with a line about each, none of them imported."""
        super().format_options(ctx, formatter)
        if subcommands := children(self.entry_name):
            from axlearn_core.cli.summaries import summary

            values = plugin_commands()
            with formatter.section("Commands"):
                formatter.write_dl([(word, summary(values[name][0]) or "") for word, name in subcommands.items()])

    def _split(self, args: Sequence[str]) -> tuple[list[str], list[str]]:
        """(the words of the subcommand that the arguments name, the other arguments)."""
        if args and args[0] in children(self.entry_name):
            return [args[0]], list(args[1:])
        own = {name for parameter in self.params for name in parameter.opts}
        flags = [arg for arg in _before_separator(args) if arg.startswith("--") and arg not in own]
        words = _longest_path(self.entry_name, {flag[2:] for flag in flags})
        chosen = {f"--{word}" for word in words}
        return words, [arg for arg in args if arg not in chosen]

    def _note_experiment(self, word: str) -> None:
        if word in children(self.entry_name) and _is_experiment(word):
            line = f"{command_line(self.entry_name)} -- {word}"
            click.echo(f"note: {word} is a command; for the experiment of this name: {line}", err=True)

    def _check_installed(self, args: Sequence[str]) -> None:
        from axlearn_core.plugins.index import package_of

        flags = (arg[2:] for arg in _before_separator(args) if arg.startswith("--"))
        for word in (*args[:1], *flags):
            package = package_of("commands", f"{self.entry_name}-{word}")
            if package and not _is_experiment(word):
                line = f"{command_line(self.entry_name)} {word}"
                raise click.UsageError(f"`{line}` is not installed: {package} brings it (pip install {package}).")

    def _plugin_options(self) -> list[tuple[str, "CommandOption"]]:
        """(`--name`, option) of each option of a plugin, by name.

        Raises:
            PluginError: two distributions, or a distribution and the command, have an option of one name.
        """
        from axlearn_core.contracts.options import CommandOption
        from axlearn_core.errors import PluginError
        from axlearn_core.plugins.registry import registry

        prefix = f"{self.entry_name}--"
        own = {name for parameter in self.params for name in parameter.opts}
        options = []
        for name in sorted(n for n in registry().claims["options"] if n.startswith(prefix)):
            entry, flag = registry().entry("options", name), f"--{name.removeprefix(prefix)}"
            option = entry.load()
            if not isinstance(option, CommandOption):
                raise PluginError(f"the {entry} is not a CommandOption, it is {option!r}")
            if flag in own:
                raise PluginError(
                    f"{flag} is an option of `{command_line(self.entry_name)}` itself and of {entry.origin}"
                )
            options.append((flag, option))
        return options

    def _no_such_option(self, error: click.NoSuchOption) -> click.UsageError:
        """The error for an unknown option: with the commands or the package that have it, or with the nearest names."""
        from axlearn_core.plugins.index import package_of

        option, line = error.option_name, command_line(self.entry_name)
        others = [name for name in family(self.entry_name) if name != self.entry_name]
        if owners := [command_line(name) for name in others if option in _option_names(name)]:
            message = f"{option} is an option of {_join(owners)}, and not of `{line}`."
        elif lines := [c for c in map(command_line, others) if option[2:] in c.split()[2:]]:
            message = f"{option} cannot be given to `{line}`: it stands for {_join(lines)}."
        elif package := package_of("options", f"{self.entry_name}{option}"):
            message = f"{option} is not installed: {package} brings it (pip install {package})."
        else:
            names = [*_option_names(self.entry_name), *(f"--{word}" for word in children(self.entry_name))]
            return click.NoSuchOption(option, possibilities=names, ctx=error.ctx)
        return click.UsageError(message, error.ctx)

    def _with_hint(self, args: Sequence[str], error: click.UsageError) -> click.UsageError:
        """A usage error with the subcommand that the first word nearly names, or that stands behind other words."""
        subcommands = children(self.entry_name)
        near = difflib.get_close_matches(args[0], subcommands, n=1) if args else []
        meant = [*near, *(arg for arg in args if arg in subcommands)]
        if not meant:
            return error
        hint = f" Did you mean: {command_line(self.entry_name)} {meant[0]} ...?"
        return click.UsageError(error.format_message() + hint, error.ctx)


def change_request(request: "Request") -> "Request":
    """The request as the options of plugins change it that were given to this command, in the order of their names."""
    context = click.get_current_context(silent=True)
    options: dict[str, Any] = context.meta.get(_GIVEN, {}) if context else {}
    for _, (option, value) in sorted(options.items()):
        request = option.change(value, request)
    return request


def load_command(name: str) -> click.Command:
    """Imports a command by its name; raises `PluginError` if it cannot be loaded."""
    from axlearn_core.cli.main import cli
    from axlearn_core.errors import PluginError

    command = cli.get_command(click.Context(cli), name)
    if command is None:
        raise PluginError(f"there is no command {name!r}")
    return command


def check_command(entry: "Entry") -> None:
    """Raises `PluginError` if a command cannot be loaded, or cannot be reached where its name puts it."""
    from axlearn_core.errors import PluginError

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


def check_option(entry: "Entry") -> None:
    """Raises `PluginError` if an option cannot be loaded, or if its command does not exist or takes no such options."""
    from axlearn_core.errors import PluginError

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


def _longest_path(name: str, words: set[str]) -> list[str]:
    """The words that lead from a command to one as far below it as possible."""
    paths = ([word, *_longest_path(child, words - {word})] for word, child in children(name).items() if word in words)
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
            ctx.meta.setdefault(_GIVEN, {})[name] = option, value

    kind: dict[str, Any] = {"is_flag": True} if option.metavar is None else {"metavar": option.metavar}
    declared = name, f"plugin_{name[2:].replace('-', '_')}"
    return click.Option(declared, help=option.help, expose_value=False, callback=remember, **kind)


def _join(lines: Sequence[str]) -> str:
    return " and ".join(f"`{line}`" for line in lines)
