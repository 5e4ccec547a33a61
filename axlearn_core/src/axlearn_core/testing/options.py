"""The suite for options that plugins add to commands of others."""

import importlib
import inspect
import subprocess
import sys
from typing import Any

import click
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_core.contracts.options import CommandOption
from axlearn_core.plugins.manager import host


class CommandOptionSuite:
    """What every option keeps that a plugin adds through the hook `axlearn_command_options`.

    Attributes:
        command: the command, such as `plan`.
        name: the option as it is written: `--one-line`.
        arguments: a command line behind the command with which the option works.
        exit_code: what the command then ends with.
    """

    command: str
    name: str
    arguments: tuple[str, ...]
    exit_code: int = 0

    def option(self) -> CommandOption:
        """The option, as the plugin that adds it declares it."""
        answers = host().answers("axlearn_command_options", command=self.command)
        named = [option for _, options in answers for option in options if option.name == self.name]
        assert len(named) == 1, f"{len(named)} plugins add {self.name} to `axlearn {self.command}`, expected one"
        return named[0]

    def target(self) -> click.Command:
        """The command that it is added to."""
        command = cli.get_command(click.Context(cli), self.command)
        assert command is not None, f"there is no command {self.command}"
        return command

    def test_it_is_written_like_an_option(self) -> None:
        option = self.option()
        assert option.name.startswith("--"), option.name
        assert option.name == option.name.lower(), option.name
        assert "_" not in option.name, f"{option.name}: options of the command line are written with hyphens"
        assert option.help.strip(), f"{option.name} has no help"
        assert "\n" not in option.help, f"{option.name}: one line for --help"

    def test_it_is_listed_without_loading_what_it_runs(self) -> None:
        module = self.option().run.partition(":")[0]
        code = (
            "import sys\nfrom axlearn_core.cli.main import cli\n"
            f"cli(['{self.command}', '--help'], standalone_mode=False)\n"
            f"print([m for m in ('jax', {module!r}) if m in sys.modules])\n"
        )
        listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
        assert listed.returncode == 0, listed.stderr
        assert self.name in listed.stdout, f"`axlearn {self.command} --help` does not list {self.name}"
        assert listed.stdout.splitlines()[-1] == "[]", f"--help imports {listed.stdout.splitlines()[-1]}"

    def test_it_takes_what_the_command_takes(self) -> None:
        module, _, attribute = self.option().run.partition(":")
        run = getattr(importlib.import_module(module), attribute)
        takes = self.target().callback
        assert takes is not None
        own = inspect.signature(inspect.unwrap(takes)).parameters
        try:
            inspect.signature(run).bind("value", **dict.fromkeys(own))
        except TypeError as error:
            raise AssertionError(f"{self.option().run} cannot be called as {self.command} is: {error}") from None

    def test_it_works(self) -> None:
        done: Any = CliRunner().invoke(cli, [self.command, *self.arguments])
        assert done.exit_code == self.exit_code, done.output
        assert done.stdout.strip(), f"{self.name} prints nothing on standard output"
