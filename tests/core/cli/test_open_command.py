"""Options that plugins add to commands of others."""

import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli

HOOKS = """
from axlearn_core.contracts.options import CommandOption
from axlearn_core.plugins.hookspecs import hookimpl

@hookimpl
def axlearn_command_options(command):
    if command != "plan":
        return []
    return [
        CommandOption(name="{name}", metavar="N", help="Plan for N chips.", run="{module}_run:chips"),
        CommandOption(name="--slack", metavar="N", help="Chips to spare.", belongs_to="{name}"),
        CommandOption(name="--dream{module}", help="Plan nothing.", run="{module}_run:missing"),
    ]
"""
RUN = """
def chips(value, *, request, function, as_json, slack):
    print(f"{value} and {slack} chips for {request.experiment}, {function}, json {as_json}, set {request.settings}")
"""


@pytest.fixture
def with_option(install):
    def make(module="my", name="--chips"):
        modules = {module: HOOKS.format(name=name, module=module), f"{module}_run": RUN}
        install(f"axlearn-plugins-{module}", "1.0", modules=modules, points={"plugins": {module: module}})

    return make


def run(*words):
    return CliRunner().invoke(cli, ["plan", *words])


def test_it_is_listed_and_takes_over(with_option):
    with_option()
    assert "--chips N" in run("--help").output
    done = run("quickstart", "--target", "cpu-8", "--chips", "12", "--json", "--set", "seed=3")
    assert done.exit_code == 0, done.output
    assert "12 and None chips for quickstart, train, json True" in done.output
    assert "seed" in done.output


def test_one_that_belongs_to_another(with_option):
    with_option()
    done = run("quickstart", "--chips", "12", "--slack", "3")
    assert done.exit_code == 0, done.output
    assert "12 and 3 chips" in done.output
    alone = run("quickstart", "--slack", "3")
    assert alone.exit_code == 2
    assert "--slack belongs to --chips\n    fix: add --chips" in alone.stderr


def test_without_it_the_command_is_as_it_was(with_option):
    with_option()
    assert "--target NAME" in run("quickstart").stderr


def test_two_of_one_name_are_an_error(with_option):
    with_option("my")
    with_option("other")
    done = run("quickstart")
    assert done.exit_code == 2
    assert "--chips is an option of my of axlearn-plugins-my 1.0 and of other" in done.stderr


def test_an_option_of_the_command_itself_cannot_be_added(with_option):
    with_option(name="--target")
    done = run("quickstart")
    assert done.exit_code == 2
    assert "--target is an option of the command 'plan' and of my" in done.stderr


def test_two_that_take_over_and_one_that_cannot_be_loaded(with_option):
    with_option()
    both = run("quickstart", "--chips", "2", "--dreammy")
    assert both.exit_code == 2
    assert "--chips and --dreammy cannot be given together" in both.stderr
    alone = run("quickstart", "--dreammy")
    assert alone.exit_code == 2
    assert "--dreammy cannot be loaded from my_run:missing" in alone.stderr
