"""Every option of every command has an effect: its code reads it, and a test or a documented command uses it."""

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from axlearn_core.cli.common import REQUEST_OPTIONS, with_request
from axlearn_core.cli.extensible import ExtensibleCommand
from axlearn_core.cli.main import cli
from axlearn_core.plugins.request import Request
from support import code_blocks
from support.paths import ROOT, RUN_OF_LLAMA


def all_commands(
    group: click.Group | ExtensibleCommand = cli, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, click.Command]]:
    """Yields the words of each command, and the command."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group | ExtensibleCommand):
            yield from all_commands(command, (*path, name))
        if not isinstance(command, click.Group):
            yield " ".join((*path, name)), command


COMMANDS = dict(all_commands())
REQUEST = {p.name for p in functools.reduce(lambda f, option: option(f), REQUEST_OPTIONS, lambda: 0).__click_params__}
TAKE_REQUEST = sorted(
    name for name, command in COMMANDS.items() if {p.name for p in command.params} >= REQUEST | {"experiment"}
)


def names_read(function: object) -> set[str]:
    """The names that the body of a function reads; if it takes `**options`, also the keys that its module reads."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    nodes = [node for statement in tree.body[1:] for node in ast.walk(statement)]
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    if tree.args.kwarg is not None and tree.args.kwarg.arg in names:
        module = ast.parse(inspect.getsource(inspect.getmodule(inspect.unwrap(function))))
        names |= {node.slice.value for node in ast.walk(module) if _is_key(node)}
    return names


def _is_key(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_reads_each_of_its_parameters(name):
    command = COMMANDS[name]
    names = names_read(command.callback)
    if name in TAKE_REQUEST and name != "launch":
        assert "request" in names
        names |= {"experiment", *REQUEST}  # `test_a_request_holds_every_option`
    if name == "launch":
        assert "train" in names
        names |= REQUEST | {"allow_drift"}  # `test_every_option_reaches_the_job`
    ignored = sorted({p.name for p in command.params if p.expose_value} - names)
    assert not ignored, f"nothing in `axlearn {name}` reads {ignored}"


def test_a_request_holds_every_option():
    options = {"with_": ("remat",), "without": ("scan",), "set_": ("seed=3",), "steps": 7, "target": "cpu-4"}
    assert {*options, "layout"} == REQUEST
    requests = []
    with_request(lambda request: requests.append(request))(experiment="quickstart", layout="no.yaml", **options)
    (request,) = requests
    assert request == Request.from_arguments(
        "quickstart", with_=("remat",), without=("scan",), set=("seed=3",), steps=7, target="cpu-4", layout="no.yaml"
    )
    plain = Request.from_arguments("quickstart")
    for name, value in (("with_", ["ema"]), ("without", ["scan"]), ("set", ["seed=3"]), ("steps", 7), ("target", "x")):
        assert Request.from_arguments("quickstart", **{name: value}) != plain, name


def show(*words: str) -> str:
    result = CliRunner().invoke(cli, ["config", "show", "quickstart", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(
    "words",
    [["--with", "ema"], ["--set", "seed=3"], ["--steps", "7"], ["--target", "h100-8x1"]],
    ids=lambda words: words[0],
)
def test_an_option_of_a_request_changes_the_config(words):
    assert show(*words) != show()


def test_without_takes_a_feature_back():
    with_ema = show("--target", "h100-8x1", "--with", "ema")
    assert show("--target", "h100-8x1", "--with", "ema", "--without", "ema") != with_ema
    assert show("--target", "h100-8x1", "--with", "ema", "--without", "ema") == show("--target", "h100-8x1")


def test_a_layout_changes_the_config(tmp_path):
    file = tmp_path / "layout.yaml"
    result = CliRunner().invoke(cli, ["config", "show", "quickstart", "--layout", str(file)])
    assert result.exit_code == 2
    assert str(file) in result.stderr


OF_A_CHECKPOINT = {
    "checkpoint export-hf": ["OUT"],
    "checkpoint export-orbax": ["OUT"],
    "checkpoint inspect": [],
    "convert": ["OUT", "--with", "ema"],
    "evaluate": ["--data", str(ROOT / "tests/fixtures/run_of_llama/text.txt")],
    "generate": ["--prompt", "a"],
    "lora export": ["OUT"],
    "lora merge": ["OUT"],
    "quantize": ["OUT"],
    "upcycle": ["OUT"],
}
"""Commands with `--step` of a run, and what else they need."""
ELSEWHERE = {"rl sample", "serve", "checkpoint import-orbax", "replay", "runs compare"}
"""Commands whose own tests try `--step`: they set up devices, need a task, read no run or two, or compute the step after a
checkpoint."""


def test_these_are_the_commands_that_read_a_checkpoint():
    have = {name for name, command in COMMANDS.items() if any("--step" in p.opts for p in command.params)}
    assert have == {*OF_A_CHECKPOINT} | ELSEWHERE


@pytest.mark.parametrize("name", OF_A_CHECKPOINT)
def test_the_step_of_a_checkpoint_is_the_one_that_is_read(name, tmp_path):
    words = [str(tmp_path / "out") if word == "OUT" else word for word in OF_A_CHECKPOINT[name]]
    result = CliRunner().invoke(cli, [*name.split(), str(RUN_OF_LLAMA), *words, "--step", "999"])
    assert result.exit_code in (1, 2)
    assert "999" in result.stderr
    assert "10, 20" in result.stderr


@functools.cache
def _texts() -> dict[Path, str]:
    """The strings of each test module, without this one."""
    files = [file for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__)]
    trees = {file: ast.parse(file.read_text("utf-8")) for file in files}
    return {
        file: " ".join(n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
        for file, tree in trees.items()
    }


@functools.cache
def _documented() -> tuple[str, ...]:
    """The lines of the pages that tests run."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*/README.md")]
    texts = [b.text for page in pages for b in code_blocks.read(page) if b.kind == "bash" and b.mark != "skip"]
    return tuple(line for text in texts for line in text.replace("\\\n", " ").splitlines())


def is_used(name: str, option: str) -> bool:
    """Whether a test or a documented command of that name has the option."""
    written = re.compile(re.escape(option) + r"(?![\w-])")
    words = [re.compile(rf"\b{re.escape(word)}\b") for word in name.split()]
    if any(written.search(text) and all(word.search(text) for word in words) for text in _texts().values()):
        return True
    return any(f"axlearn {name} " in line and written.search(line) for line in _documented())


def test_every_option_is_used_by_a_test_or_a_page():
    unused = [
        f"axlearn {name} {parameter.opts[0]}"
        for name, command in COMMANDS.items()
        for parameter in command.get_params(click.Context(command))
        if isinstance(parameter, click.Option) and "--help" not in parameter.opts
        if parameter.name not in REQUEST | {"step"}  # the tests above are theirs
        if not any(is_used(name, option) for option in (*parameter.opts, *parameter.secondary_opts))
    ]
    assert not unused, "no test tries " + ", ".join(unused)


def test_an_option_that_nothing_reads_is_found():
    @click.command()
    @click.option("--size")
    @click.option("--colour")
    def paint(size, colour):
        """Paint something."""
        click.echo(size)

    assert "size" in names_read(paint.callback)
    assert "colour" not in names_read(paint.callback)
    assert not is_used("serve", "--colour-of-no-command")
