"""Commands and options that plugins add to commands of others, and how their mistakes are reported."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from axlearn_core.cli.commands import children, command_line, parent, related_commands
from axlearn_core.cli.main import cli
from axlearn_testing import CommandOptionSuite, CommandSuite

COMMANDS = '''
import click
from axlearn_core.cli.common import experiment_argument, request_options
from axlearn_core.cli.extensible import ExtensibleCommand

@click.command("plan-{word}", cls=ExtensibleCommand)
@experiment_argument
@request_options
@click.option("--slack", metavar="N", help="Cores to spare.")
def cores(request, slack):
    """Count cores."""
    print(f"cores for {{request.experiment}} with {{slack}}, settings {{[s.path for s in request.settings]}}")

@click.command("plan-{word}-wide", cls=ExtensibleCommand)
@experiment_argument
@request_options
@click.option("--width", metavar="N", help="Cores side by side.")
def wide(request, width):
    """Count cores side by side."""
    print(f"wide {{width}} for {{request.experiment}}")

@click.command()
def plain():
    """Count nothing."""

def no_command():
    pass
'''
OPTIONS = """
import attrs
from axlearn_core.contracts.options import CommandOption
from axlearn_core.plugins.request import Setting

def seed(value, request):
    return attrs.evolve(request, settings=(*request.settings, Setting(path="seed", value=int(value))))

def first(value, request):
    return attrs.evolve(request, settings=(*request.settings, Setting(path="max_steps", value=1)))

SEED = CommandOption(help="Seed of the run.", metavar="N", change=seed)
FIRST = CommandOption(help="One step.", change=first)
"""


@pytest.fixture
def with_commands(install):
    def make(module="my", word="cores", **points):
        modules = {f"{module}_commands": COMMANDS.format(word=word), f"{module}_options": OPTIONS}
        commands = {f"plan-{word}": f"{module}_commands:cores", f"plan-{word}-wide": f"{module}_commands:wide"}
        points = {"commands": commands, **points}
        install(f"axlearn-plugins-{module}", "1.0", modules=modules, points=points)

    return make


def run(*words):
    return CliRunner().invoke(cli, list(words))


def test_a_name_says_where_a_command_stands(with_commands):
    with_commands()
    assert parent("plan-cores") == "plan"
    assert parent("plan-cores-wide") == "plan-cores"
    assert parent("plan") is parent("never-heard-of") is None
    assert children("plan-cores") == {"wide": "plan-cores-wide"}
    assert "cores" in children("plan")
    assert "cores-wide" not in children("plan")
    assert {"plan", "plan-cores", "plan-cores-wide"} <= set(related_commands("plan-cores-wide"))
    assert command_line("plan-cores-wide") == "axlearn plan cores wide"


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "cores", "quickstart", "--slack", "3"),
        ("plan", "quickstart", "--cores", "--slack", "3"),
        ("plan", "--slack", "3", "--cores", "quickstart"),
    ],
)
def test_a_subcommand_by_its_word_or_as_a_flag(with_commands, words):
    with_commands()
    result = run(*words, "--set", "seed=3")
    assert result.exit_code == 0, result.output
    assert result.stdout == "cores for quickstart with 3, settings ['seed']\n"


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "cores", "wide", "quickstart"),
        ("plan", "cores", "--wide", "quickstart"),
        ("plan", "quickstart", "--cores", "--wide"),
        ("plan", "quickstart", "--wide", "--cores"),
    ],
)
def test_a_subcommand_of_a_subcommand(with_commands, words):
    with_commands()
    result = run(*words, "--width", "2")
    assert result.exit_code == 0, result.output
    assert result.stdout == "wide 2 for quickstart\n"


def test_each_has_its_own_help(with_commands):
    with_commands()
    above, below = run("plan", "--help").stdout, run("plan", "cores", "--help").stdout
    assert "cores" in above
    assert "Count cores." in above
    assert "--slack" not in above
    assert "--slack N" in below
    assert "--function" not in below
    assert "wide  Count cores side by side." in below
    assert run("plan", "quickstart", "--cores", "--help").stdout == below


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["plan", "quickstart", "--slack", "3"],
            "--slack is an option of `axlearn plan cores`, not of `axlearn plan`",
        ),
        (["plan", "quickstart", "--cores", "--width", "3"], "--width is an option of `axlearn plan cores wide`"),
        (["plan", "cores", "quickstart", "--function", "x"], "--function is an option of `axlearn plan`, not"),
        (
            ["plan", "quickstart", "--cores", "--search"],
            "--search cannot be used with `axlearn plan cores`: it selects",
        ),
        (["plan", "quickstart", "cores"], "Did you mean: axlearn plan cores ...?"),
        (["plan", "corse", "quickstart"], "Did you mean: axlearn plan cores ...?"),
        (["plan", "quickstart", "--corse"], "No such option '--corse'. (Did you mean one of: '--cores'"),
        (["plan", "cores"], "Missing argument"),
    ],
)
def test_one_clear_error(with_commands, words, message):
    with_commands()
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.count("rror") == 1


def test_without_them_the_command_is_as_it_was(with_commands):
    with_commands()
    assert "--target NAME" in run("plan", "quickstart").stderr
    assert "unknown experiment 'quickstar'" in run("plan", "quickstar").stderr


def test_an_experiment_with_the_name_of_a_subcommand(with_commands, tmp_path):
    with_commands(experiments={"cores": "axlearn_plugins_models.llama.experiments:quickstart"})
    word = run("plan", "cores", "quickstart")
    assert word.stdout.startswith("cores for quickstart")
    assert "note: cores is a subcommand; to use the experiment of this name: axlearn plan -- cores" in word.stderr
    assert "--target NAME" in run("plan", "--", "cores").stderr, "it plans the experiment, which needs a target"
    file = tmp_path / "cores"
    file.write_text("experiment: quickstart\nset: {seed: 4}\n")
    assert run("plan", "cores", str(file)).stdout.startswith(f"cores for {file}")
    assert "--target NAME" in run("plan", str(file)).stderr


def test_a_word_behind_the_separator_is_no_flag(with_commands):
    with_commands()
    result = run("plan", "--", "--cores")
    assert result.exit_code == 2
    assert "unknown experiment '--cores'" in result.stderr


def test_an_option_of_the_command_goes_before_a_flag(with_commands):
    with_commands(word="json")
    assert "--target NAME" in run("plan", "quickstart", "--json").stderr
    assert run("plan", "json", "quickstart").stdout.startswith("cores for quickstart")


def test_options_change_the_request(with_commands):
    with_commands(options={"plan-cores--seed": "my_options:SEED", "plan-cores--first": "my_options:FIRST"})
    assert "--seed N" in run("plan", "cores", "--help").stdout
    assert "--seed" not in run("plan", "--help").stdout
    for words in (("--seed", "3", "--first"), ("--first", "--seed", "3")):
        result = run("plan", "cores", "quickstart", *words)
        assert result.stdout == "cores for quickstart with None, settings ['max_steps', 'seed']\n", result.output
    assert run("plan", "cores", "quickstart").stdout == "cores for quickstart with None, settings []\n"
    assert "--seed is an option of `axlearn plan cores`" in run("plan", "quickstart", "--seed", "3").stderr


def test_an_option_of_train(with_commands):
    with_commands(options={"train--first": "my_options:FIRST"})
    result = run("train", "quickstart", "--first", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "from step 0 to 1\n" in result.stdout


def test_two_options_of_one_name_name_both_distributions(with_commands):
    points = {"options": {"plan--seed": "my_options:SEED"}}
    with_commands(**points)
    with_commands("other", "others", **points)
    result = run("plan", "quickstart")
    assert result.exit_code == 2
    assert "2 distributions register the option 'plan--seed'" in result.stderr
    assert "axlearn-plugins-my 1.0" in result.stderr
    assert "axlearn-plugins-other 1.0" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"plan--target": "my_options:SEED"},
            "axlearn-plugins-my 1.0 registers --target, which is already an option of `axlearn plan`",
        ),
        ({"plan--seed": "my_options:seed"}, "not a CommandOption"),
        ({"plan--seed": "my_options:SEEDS"}, "cannot be loaded"),
    ],
)
def test_options_that_are_wrong(with_commands, options, message):
    with_commands(options=options)
    result = run("plan", "quickstart")
    assert result.exit_code == 2
    assert message in result.stderr


def doctor(name):
    lines = run("plugins", "doctor").stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if f" {name}  (" in line)
    end = next((i for i in range(start + 1, len(lines)) if not lines[i].startswith("   ")), len(lines))
    return "\n".join(lines[start:end])


@pytest.fixture
def only_mine(monkeypatch):
    """The doctor looks at few distributions: importing all of them takes its time."""
    from axlearn_core.plugins.registry import GROUPS, registry

    names = {"axlearn-core", "axlearn-plugins-plan", "axlearn-plugins-tools", "axlearn-plugins-my"}
    others = {e.distribution for group in GROUPS for e in registry().entries(group)} - names
    monkeypatch.setenv("AXLEARN_PLUGINS", ",".join(f"-{name}" for name in sorted(others)))


@pytest.mark.fast_cases("points5-plan-core-has the click name 'plan-cores'")
@pytest.mark.parametrize(
    ("points", "name", "message"),
    [
        ({"options": {"seed": "my_options:SEED"}}, "seed", "expected: COMMAND--OPTION"),
        ({"options": {"nope--seed": "my_options:SEED"}}, "nope--seed", "the command 'nope' does not exist"),
        ({"options": {"targets--seed": "my_options:SEED"}}, "targets--seed", "which does not accept plugin options"),
        ({"options": {"plan--json": "my_options:SEED"}}, "plan--json", "which is already an option of `axlearn plan`"),
        ({"commands": {"bench-step-cores": "my_commands:plain"}}, "bench-step-cores", "which cannot have subcommands"),
        ({"commands": {"plan-core": "my_commands:cores"}}, "plan-core", "has the click name 'plan-cores'"),
        ({"commands": {"cores": "my_commands:no_command"}}, "cores", "not a click command"),
    ],
)
def test_the_doctor_finds_what_cannot_be_reached(with_commands, only_mine, points, name, message):
    with_commands(**points)
    finding = doctor(name)
    assert finding.startswith("error"), finding
    assert message in finding


def test_the_doctor_takes_what_is_right(with_commands, only_mine):
    with_commands(options={"plan--seed": "my_options:SEED"})
    assert all(doctor(name).startswith("ok") for name in ("plan-cores", "plan-cores-wide", "plan--seed"))


def test_a_shell_completes_subcommands(with_commands, monkeypatch):
    with_commands()
    code = "from axlearn_core.cli.main import cli; cli(prog_name='axlearn')"
    environment = {"_AXLEARN_COMPLETE": "bash_complete", "COMP_WORDS": "axlearn plan se", "COMP_CWORD": "2"}
    import os

    process = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert {"plain,search", "plain,serve"} <= set(process.stdout.split())


class TestCores(CommandSuite):
    name, arguments = "bench-step", ("quickstart", "--help")


RIGHT = {"help": "Seed of the run.", "metavar": '"N"', "change": "attrs.evolve(request, target=value)", "top": ""}
SUITE = """
import attrs
from axlearn_core.contracts.options import CommandOption
{top}
OPTION = CommandOption(help="{help}", metavar={metavar}, change=lambda value, request: {change})
"""
WRONG = {
    "test_option_name_and_help_are_valid": [
        {"name": "--Where"},
        {"name": "--w_here"},
        {"help": " "},
        {"metavar": "None"},
    ],
    "test_help_lists_option_without_importing_jax": [{"top": "import jax"}],
    "test_option_changes_request": [
        {"change": "request"},
        {"change": "value"},
        {"change": "attrs.evolve(request, target=str(id(object())) + str(__import__('time').perf_counter_ns()))"},
    ],
    "test_command_accepts_option": [{"command": "serve"}],
    "test_command_succeeds": [{"change": "1 / 0"}],
}


@pytest.fixture
def suite(install, monkeypatch):
    def make(name="--where", command="plan", **changes):
        source = SUITE.format(**{**RIGHT, **changes})
        points = {"options": {f"{command}{name}": "suite_options:OPTION"}}
        folder = install("axlearn-plugins-suite", "1.0", modules={"suite_options": source}, points=points)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        checks = CommandOptionSuite()
        checks.command, checks.name, checks.value = command, name, "cpu-8"
        checks.arguments = ("quickstart", name, "cpu-8", "--function", "init", "--json")
        return checks

    return make


@pytest.mark.parametrize("name", [name for name in WRONG if name != "test_command_succeeds"])
def test_the_suite_takes_a_right_option(suite, name):
    getattr(suite(), name)()


@pytest.mark.slow_cases("test_help_lists_option_without_importing_jax-changes4")
@pytest.mark.parametrize(("name", "changes"), [(n, c) for n, wrong in WRONG.items() for c in wrong])
def test_the_suite_finds_a_wrong_option(suite, name, changes):
    from axlearn_core.errors import PluginError

    with pytest.raises((AssertionError, PluginError)):
        getattr(suite(**changes), name)()
