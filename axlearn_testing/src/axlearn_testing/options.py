"""The suite for options that plugins add to commands of others."""

import importlib
import inspect
import subprocess
import sys
from typing import Any

import click
import pytest
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
        matches = [option for _, options in answers for option in options if option.name == self.name]
        assert len(matches) == 1, f"{len(matches)} plugins add {self.name} to `axlearn {self.command}`, expected one"
        return matches[0]

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

    def test_it_runs_in_the_place_of_the_command(self, monkeypatch: Any) -> None:
        if self.option().belongs_to is not None:
            pytest.skip(f"{self.option().belongs_to} runs in its place, and gets its value")
        module, _, attribute = self.option().run.partition(":")
        calls: list[Any] = []
        monkeypatch.setattr(importlib.import_module(module), attribute, lambda *args, **named: calls.append(args))
        result: Any = CliRunner().invoke(cli, [self.command, *self.arguments])
        assert calls, (
            f"`axlearn {self.command} {' '.join(self.arguments)}` does not run {self.option().run}: {result.output}"
        )

    def test_it_works(self) -> None:
        result: Any = CliRunner().invoke(cli, [self.command, *self.arguments])
        assert result.exit_code == self.exit_code, result.output
        assert result.stdout.strip(), f"{self.name} prints nothing on standard output"
