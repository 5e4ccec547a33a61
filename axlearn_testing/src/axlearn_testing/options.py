"""Suites for commands and command options that plugins register through entry points."""

import subprocess
import sys
from typing import Any

import click
from click.testing import CliRunner

from axlearn_core.cli.commands import command_line, plugin_commands
from axlearn_core.cli.extensible import check_command, check_option
from axlearn_core.cli.main import cli
from axlearn_core.cli.summaries import summary
from axlearn_core.contracts.options import CommandOption
from axlearn_core.plugins.registry import Entry, registry
from axlearn_core.plugins.request import Request


class CommandSuite:
    """Tests for a command in the `axlearn.commands` entry-point group.

    Attributes:
        name: Name of the entry point, such as `plan-search` for `axlearn plan search`.
        arguments: Arguments with which the command works.
        exit_code: Expected exit code.
    """

    name: str
    arguments: tuple[str, ...]
    exit_code: int = 0

    def entry(self) -> Entry:
        """Return the entry point of the command."""
        return registry().entry("commands", self.name)

    def summary(self) -> str | None:
        """Return the command's line in its parent command's help text."""
        return summary(plugin_commands()[self.name][0])

    def test_command_matches_entry_point_name(self) -> None:
        check_command(self.entry())
        assert isinstance(self.entry().load(), click.Command)

    def test_command_has_summary(self) -> None:
        line = self.summary()
        assert line, f"the function of {self.name} needs a docstring"
        assert line.endswith("."), f"the first line of the docstring must end with a period: {line}"

    def test_help_imports_no_jax(self) -> None:
        _check_help(command_line(self.name))

    def test_command_succeeds(self) -> None:
        result: Any = CliRunner().invoke(cli, [*command_line(self.name).split()[1:], *self.arguments])
        assert result.exit_code == self.exit_code, result.output
        assert result.stdout.strip(), f"{command_line(self.name)} prints nothing to standard output"


class CommandOptionSuite:
    """Tests for an option in the `axlearn.options` entry-point group.

    Attributes:
        command: Name of the command, such as `train`, or `plan-search` for `axlearn plan search`.
        name: Option with its hyphens, such as `--seed`.
        value: Value of the option as the command line parses it; True for a flag.
        arguments: Arguments with which the command works, including the option.
        experiment: Experiment to apply `value` to.
        exit_code: Expected exit code.
    """

    command: str
    name: str
    value: Any = True
    arguments: tuple[str, ...]
    experiment: str = "quickstart"
    exit_code: int = 0

    def entry(self) -> Entry:
        """Return the entry point of the option."""
        return registry().entry("options", f"{self.command}{self.name}")

    def option(self) -> CommandOption:
        """Load the option."""
        return self.entry().load()

    def test_command_accepts_option(self) -> None:
        check_option(self.entry())

    def test_option_name_and_help_are_valid(self) -> None:
        option = self.option()
        assert self.name.startswith("--"), self.name
        assert self.name == self.name.lower(), self.name
        assert "_" not in self.name, f"{self.name}: options must be written with hyphens"
        assert option.help.strip(), f"{self.name} needs a help text"
        assert "\n" not in option.help, f"{self.name}: the help text must be one line"
        assert (option.metavar is None) == (self.value is True), (
            f"{self.name} needs a metavar exactly if it has a value"
        )

    def test_help_lists_option_without_importing_jax(self) -> None:
        assert self.name in _check_help(command_line(self.command)), f"--help does not list {self.name}"

    def test_option_changes_request(self) -> None:
        before = Request.from_arguments(self.experiment)
        after = self.option().change(self.value, before)
        assert isinstance(after, Request), f"{self.name} returns {type(after).__name__}, expected a Request"
        assert after != before, f"{self.name} changes nothing"
        assert after == self.option().change(self.value, before), f"{self.name} returns a different request each time"

    def test_command_succeeds(self) -> None:
        words = command_line(self.command).split()[1:]
        result: Any = CliRunner().invoke(cli, [*words, *self.arguments])
        assert result.exit_code == self.exit_code, result.output


def _check_help(line: str) -> str:
    """Return a command's help text, printed in a new process. Assert that it does not import JAX."""
    code = (
        "import sys\nfrom axlearn_core.cli.main import cli\n"
        f"cli({[*line.split()[1:], '--help']!r}, standalone_mode=False)\n"
        "print('jax' in sys.modules)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert process.returncode == 0, process.stderr
    help_text, _, is_imported = process.stdout.rstrip().rpartition("\n")
    assert is_imported == "False", f"`{line} --help` imports JAX"
    return help_text
