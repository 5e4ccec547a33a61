"""The command `axlearn`. A command is imported when it is called: `--help` imports no JAX, no configs, no plugins."""

import difflib
import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click
from click.shell_completion import CompletionItem

from axlearn_core.cli.commands import COMMANDS, children, command_line, parent, plugin_commands

TRAINING = ("train", "bench")  # for these the process starts anew with other settings of the C library


class Commands(click.Group):
    """The commands of the table above, then those that plugins register; also where errors become exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, the core's first."""
        names = {n for n in plugin_commands() if parent(n) is None}
        return [*COMMANDS, *sorted(names - COMMANDS.keys())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the one command."""
        _, plugin = plugin_commands().get(cmd_name, ("", ""))
        if cmd_name in COMMANDS and not plugin:
            module, _, name = COMMANDS[cmd_name][0].partition(":")
            return getattr(importlib.import_module(module), name)
        if not plugin:
            return None
        from axlearn_core.errors import PluginError
        from axlearn_core.plugins.registry import registry

        if cmd_name in COMMANDS:
            raise PluginError(f"the command {cmd_name!r} is one of axlearn-core, and {plugin} registers it too")
        entry = registry().entry("commands", cmd_name)
        command = entry.load()
        if not isinstance(command, click.Command):
            raise PluginError(f"the {entry} is not a click command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Adds the nearest names to the error for an unknown command."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            lines = {n: command_line(n).removeprefix("axlearn ") for n in plugin_commands()}
            below = {line.split()[-1]: line for line in lines.values() if " " in line}
            names = below | {n: n for n in self.list_commands(ctx)}
            raise _unknown(args[0], args[0], names, error, ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands with the lines of the table, none of them imported."""
        from axlearn_core.cli.summaries import summary

        plugins = plugin_commands()
        lines = {n: COMMANDS[n][1] if n in COMMANDS else summary(plugins[n][0]) for n in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, line or f"({plugins[name][1]})") for name, line in lines.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The names of commands and options, without importing any command."""
        names = [CompletionItem(name) for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Reads the arguments; prints help where that is asked for."""
        with _errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        with _errors():
            return super().invoke(ctx)


class Group(click.Group):
    """Commands below a word: those of the core, and what plugins register as `WORD-NAME`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names."""
        return [*super().list_commands(ctx), *children(self.name or "")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the command of a plugin."""
        return super().get_command(ctx, cmd_name) or cli.get_command(ctx, f"{self.name}-{cmd_name}")

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Adds the nearest names to the error for an unknown command."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            names = {n: n for n in self.list_commands(ctx)}
            raise _unknown(f"{self.name}-{args[0]}", args[0], names, error, ctx) from None


def _unknown(
    name: str, word: str, names: Mapping[str, str], error: click.UsageError, ctx: click.Context
) -> click.UsageError:
    """The error for a word that is not a command: with the package that brings it, or the nearest names.

    `names`: word -> what to type, which also has the words of the group that the command is below.
    """
    from axlearn_core.plugins.index import package_of

    if package := package_of("commands", name):
        return click.UsageError(f"{word!r} is not installed: {package} brings it (pip install {package}).", ctx)
    close = [names[n] for n in difflib.get_close_matches(word, names)]
    hint = f" Did you mean: {', '.join(close)}?" if close and "mean" not in error.message else ""
    return click.UsageError(error.message + hint, ctx)


def _translate(error: Exception) -> Exception:
    """An error of ours for what JAX and NumPy say about devices and memory, whichever command asks first."""
    from axlearn_core.errors import RequestError, WorkError

    text = str(error)
    if text.startswith("Unable to initialize backend"):
        return RequestError(f"JAX has no devices: {text}\n    fix: see what JAX_PLATFORMS says, or unset it")
    if isinstance(error, MemoryError) or text.startswith("RESOURCE_EXHAUSTED"):
        reason = text.partition("\n")[0] or "the system has none left"
        return WorkError(
            f"out of memory: {reason}\n"
            "    fix: `axlearn plan` says what a step takes; a smaller batch, or `--with remat`, takes less"
        )
    return error


@contextmanager
def _errors() -> Iterator[None]:
    """Errors as exit codes: 1 when the work failed, 2 when the request was wrong, 130 after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        raise click.exceptions.Exit(130) from None
    except (click.exceptions.Exit, click.ClickException, click.Abort):
        raise  # of click itself, as after `--help`: imports nothing
    except Exception as error:  # raised again below unless it is ours; our classes are not imported at every start
        from axlearn_core.errors import AxlearnError, escape_controls

        error = _translate(error)
        if not isinstance(error, AxlearnError):
            raise
        click.echo(f"{click.style('error:', fg='red', bold=True)} {escape_controls(str(error))}", err=True)
        raise click.exceptions.Exit(error.exit_code) from error


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="axlearn-core", prog_name="axlearn")
def cli() -> None:
    """Train large models from a small core and installable plugins.

    Start with `axlearn train quickstart`. Results go to standard output, messages to standard error.
    """


def main() -> None:
    """The console script."""
    if sys.argv[1:2] and sys.argv[1] in TRAINING and "jax" not in sys.modules:
        from axlearn_core.compat import restart_with_tunables

        restart_with_tunables()
    cli(prog_name="axlearn")
