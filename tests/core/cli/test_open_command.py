"""Options that plugins add to commands of others."""

import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_testing import CommandOptionSuite

HOOKS = """
from axlearn_core.contracts.options import CommandOption
from axlearn_core.plugins.hookspecs import hookimpl

@hookimpl
def axlearn_command_options(command):
    if command != "plan":
        return []
    return [
        CommandOption(name="{name}", metavar="N", help="Plan for N chips.", run="{module}_run:cores"),
        CommandOption(name="--slack", metavar="N", help="Chips to spare.", belongs_to="{name}"),
        CommandOption(
            name="--wide", help="Cores side by side.", run="{module}_run:missing", beside={{"{name}": "{module}_run:wide"}}
        ),
        CommandOption(name="--dream{module}", help="Plan nothing.", run="{module}_run:missing"),
    ]
"""
RUN = """
def cores(value, *, request, function, as_json, slack):
    print(f"{value} and {slack} chips for {request.experiment}, {function}, json {as_json}, set {request.settings}")
"""


RUN += """
def wide(value, *, request, function, as_json):
    print(f"wide {value} for {request.experiment}")
"""


@pytest.fixture
def with_option(install):
    def make(module="my", name="--cores"):
        modules = {module: HOOKS.format(name=name, module=module), f"{module}_run": RUN}
        install(f"axlearn-plugins-{module}", "1.0", modules=modules, points={"plugins": {module: module}})

    return make


def run(*words):
    return CliRunner().invoke(cli, ["plan", *words])


def test_it_is_listed_and_takes_over(with_option):
    with_option()
    assert "--cores N" in run("--help").output
    result = run("quickstart", "--target", "cpu-8", "--cores", "12", "--json", "--set", "seed=3")
    assert result.exit_code == 0, result.output
    assert "12 and None chips for quickstart, train, json True" in result.output
    assert "seed" in result.output


def test_one_that_belongs_to_another(with_option):
    with_option()
    result = run("quickstart", "--cores", "12", "--slack", "3")
    assert result.exit_code == 0, result.output
    assert "12 and 3 chips" in result.output
    alone = run("quickstart", "--slack", "3")
    assert alone.exit_code == 2
    assert "--slack belongs to --cores\n    fix: add --cores" in alone.stderr


def test_one_that_may_stand_beside_another(with_option):
    with_option()
    result = run("quickstart", "--cores", "2", "--wide")
    assert result.exit_code == 0, result.output
    assert "wide True for quickstart" in result.output
    both = run("quickstart", "--cores", "2", "--wide", "--slack", "3")
    assert both.exit_code == 2
    assert "--slack cannot be given with --wide" in both.stderr


def test_without_it_the_command_is_as_it_was(with_option):
    with_option()
    assert "--target NAME" in run("quickstart").stderr


def test_two_of_one_name_are_an_error(with_option):
    with_option("my")
    with_option("other")
    result = run("quickstart")
    assert result.exit_code == 2
    assert "--cores is an option of my of axlearn-plugins-my 1.0 and of other" in result.stderr


def test_an_option_of_the_command_itself_cannot_be_added(with_option):
    with_option(name="--target")
    result = run("quickstart")
    assert result.exit_code == 2
    assert "--target is an option of the command 'plan' and of my" in result.stderr


def test_two_that_take_over_and_one_that_cannot_be_loaded(with_option):
    with_option()
    both = run("quickstart", "--cores", "2", "--dreammy")
    assert both.exit_code == 2
    assert "--cores and --dreammy cannot be given together" in both.stderr
    alone = run("quickstart", "--dreammy")
    assert alone.exit_code == 2
    assert "--dreammy cannot be loaded from my_run:missing" in alone.stderr


SUITE = """
import sys
from axlearn_core.contracts.options import CommandOption
from axlearn_core.plugins.hookspecs import hookimpl
{top}

@hookimpl
def axlearn_command_options(command):
    option = CommandOption(name="{name}", help="{help}", run="suite_run:run")
    return [option] if command == "plan" else []
"""
RIGHT = {
    "top": "",
    "name": "--dream",
    "help": "Plan nothing.",
    "run": "def run(flag, request, function, as_json): print(1)",
}
WRONG = {
    "test_it_is_written_like_an_option": [{"name": "--day_dream"}, {"name": "--Dream"}, {"help": " "}],
    "test_it_is_listed_without_loading_what_it_runs": [{"top": "import suite_run"}, {"top": "import jax"}],
    "test_it_takes_what_the_command_takes": [{"run": "def run(flag, request, function): print(1)"}],
    "test_it_works": [
        {"run": "def run(flag, request, function, as_json): pass"},
        {"run": "def run(flag, request, function, as_json): 1 / 0"},
    ],
}


@pytest.fixture
def dream(install, monkeypatch, tmp_path):
    def make(**changes):
        parts = {**RIGHT, **changes}
        modules = {"suite_hooks": SUITE.format(**parts), "suite_run": parts["run"] + "\n"}
        folder = install("axlearn-plugins-dream", "1.0", modules=modules, points={"plugins": {"dream": "suite_hooks"}})
        monkeypatch.setenv("PYTHONPATH", str(folder))
        suite = CommandOptionSuite()
        suite.command, suite.name, suite.arguments = "plan", parts["name"], ("quickstart", parts["name"])
        return suite

    return make


@pytest.mark.parametrize("name", WRONG)
def test_the_suite_takes_a_right_option(dream, name):
    getattr(dream(), name)()


@pytest.mark.parametrize(("name", "changes"), [(n, c) for n, wrong in WRONG.items() for c in wrong])
def test_the_suite_finds_a_wrong_option(dream, name, changes):
    with pytest.raises(AssertionError):
        getattr(dream(**changes), name)()
