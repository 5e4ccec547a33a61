"""The `axlearn` command. Subcommands are imported on use, so `--help` imports neither JAX nor configs nor plugins."""

import difflib
import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click
from click.shell_completion import CompletionItem

from axlearn_core.cli.commands import COMMANDS, children, command_line, parent, plugin_commands

_TRAINING_COMMANDS = ("train", "bench")  # these restart the process with different settings for the C library


class Commands(click.Group):
    """The top-level group, which contains the commands from the core and from plugins. It converts errors to exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, core commands first."""
        names = {n for n in plugin_commands() if parent(n) is None}
        return [*COMMANDS, *sorted(names - COMMANDS.keys())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        _, plugin = plugin_commands().get(cmd_name, ("", ""))
        if cmd_name in COMMANDS and not plugin:
            module, _, name = COMMANDS[cmd_name][0].partition(":")
            return getattr(importlib.import_module(module), name)
        if not plugin:
            return None
        from axlearn_core.errors import PluginError
        from axlearn_core.plugins.registry import registry

        if cmd_name in COMMANDS:
            raise PluginError(f"{plugin} registers the command {cmd_name!r}, which is a command of axlearn-core")
        entry = registry().entry("commands", cmd_name)
        command = entry.load()
        if not isinstance(command, click.Command):
            raise PluginError(f"the {entry} is not a click command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Add the nearest names to the error for an unknown command."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            lines = {n: command_line(n).removeprefix("axlearn ") for n in plugin_commands()}
            subcommands = {line.split()[-1]: line for line in lines.values() if " " in line}
            names = subcommands | {n: n for n in self.list_commands(ctx)}
            raise _unknown_command_error(args[0], args[0], names, error, ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Format a summary of each command, without importing the commands."""
        from axlearn_core.cli.summaries import summary

        plugins = plugin_commands()
        lines = {n: COMMANDS[n][1] if n in COMMANDS else summary(plugins[n][0]) for n in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, line or f"({plugins[name][1]})") for name, line in lines.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the names of commands and options, without importing the commands."""
        names = [CompletionItem(name) for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the arguments. Print the help if requested."""
        with _exit_on_error():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with _exit_on_error():
            return super().invoke(ctx)


class Group(click.Group):
    """A group of subcommands from the core and from plugins. Plugins register theirs as `GROUP-NAME`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all subcommands."""
        return [*super().list_commands(ctx), *children(self.name or "")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a subcommand. Import it if it belongs to a plugin."""
        return super().get_command(ctx, cmd_name) or cli.get_command(ctx, f"{self.name}-{cmd_name}")

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Add the nearest names to the error for an unknown command."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            names = {n: n for n in self.list_commands(ctx)}
            raise _unknown_command_error(f"{self.name}-{args[0]}", args[0], names, error, ctx) from None


def _unknown_command_error(
    name: str, word: str, names: Mapping[str, str], error: click.UsageError, ctx: click.Context
) -> click.UsageError:
    """Return the error for an unknown command. It suggests the package that provides the command, or the nearest names.

    Args:
        name: Full name of the command, such as `checkpoint-list`.
        word: The word that the user typed.
        names: Known words, with the text to type for each.
        error: The error from click.
        ctx: The context of the error.
    """
    from axlearn_core.plugins.index import find_package

    if package := find_package("commands", name):
        return click.UsageError(f"{word!r} is not installed: {package} provides it (pip install {package}).", ctx)
    close = [names[n] for n in difflib.get_close_matches(word, names)]
    hint = f" Did you mean: {', '.join(close)}?" if close and "mean" not in error.message else ""
    return click.UsageError(error.message + hint, ctx)


def _translate_error(error: Exception) -> Exception:
    """Convert JAX and NumPy errors about devices and memory to errors that suggest a fix. Return other errors unchanged."""
    from axlearn_core.errors import RequestError, WorkError

    text = str(error)
    if text.startswith("Unable to initialize backend"):
        return RequestError(
            f"JAX has no devices: {text}\n    fix: check the environment variable JAX_PLATFORMS, or unset it"
        )
    if isinstance(error, MemoryError) or text.startswith("RESOURCE_EXHAUSTED"):
        reason = text.partition("\n")[0] or "the system is out of memory"
        return WorkError(
            f"out of memory: {reason}\n"
            "    fix: reduce the batch size, or use `--with remat`; `axlearn plan` estimates the memory of a step"
        )
    return error


@contextmanager
def _exit_on_error() -> Iterator[None]:
    """Exit with code 1 if the work failed, 2 if the request was invalid, and 130 after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        raise click.exceptions.Exit(130) from None
    except (click.exceptions.Exit, click.ClickException, click.Abort):
        raise  # from click, for example after `--help`; imports nothing
    except Exception as error:  # import the error classes only after an error, so that startup is fast
        from axlearn_core.errors import AxlearnError, escape_controls

        error = _translate_error(error)
        if not isinstance(error, AxlearnError):
            raise
        click.echo(f"{click.style('error:', fg='red', bold=True)} {escape_controls(str(error))}", err=True)
        raise click.exceptions.Exit(error.exit_code) from error


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="axlearn-core", prog_name="axlearn")
def cli() -> None:
    """Train and serve large models with a small core and plugins.

    Start with `axlearn train quickstart`. Results are printed to standard output, messages to standard error.
    """


def main() -> None:
    """Run the console script."""
    if sys.argv[1:2] and sys.argv[1] in _TRAINING_COMMANDS and "jax" not in sys.modules:
        from axlearn_core.compat import restart_with_tunables

        restart_with_tunables()
    cli(prog_name="axlearn")
