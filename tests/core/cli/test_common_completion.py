"""Shell completion, from the script of the shell to the answers."""

import os
import shutil
import subprocess
import sys

import pytest


def answers(line, word):
    """What the command answers bash for a line whose last word is being typed."""
    words = line.split()
    env = {"_AXLEARN_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - (word != ""))}
    code = "import sys; sys.argv[0] = 'axlearn'; from axlearn_core.cli.main import cli; cli(prog_name='axlearn')"
    result = subprocess.run([sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True)
    assert not result.stderr
    return [tuple(item.split(",")) for item in result.stdout.split()]


@pytest.mark.fast_cases("axlearn ru-ru-expected1", "axlearn tr-tr-expected0")
@pytest.mark.parametrize(
    ("line", "word", "expected"),
    [
        ("axlearn tr", "tr", ("plain", "train")),
        ("axlearn ru", "ru", ("plain", "runs")),
        ("axlearn plugins do", "do", ("plain", "doctor")),
        ("axlearn train qu", "qu", ("plain", "quickstart")),
        ("axlearn plan llama2-7", "llama2-7", ("plain", "llama2-7b")),
        ("axlearn config show qu", "qu", ("plain", "quickstart")),
        ("axlearn train quickstart --with lo", "lo", ("plain", "lora")),
        ("axlearn train --dr", "--dr", ("plain", "--dry-run")),
        ("axlearn train ./my", "./my", ("file", "./my")),
    ],
)
def test_what_is_offered(line, word, expected):
    assert expected in answers(line, word)


def test_nothing_is_imported_for_a_name():
    code = (
        "import sys, click; from axlearn_core.cli.main import cli\n"
        "ctx = click.Context(cli); names = [i.value for i in cli.shell_complete(ctx, '')]\n"
        "assert {'train', 'plan', 'runs'} <= {*names}, names\n"
        "assert not {m for m in sys.modules if m.startswith(('jax', 'axlearn_plugins'))}"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell(shell):
    env = {"_AXLEARN_COMPLETE": f"{shell}_source"}
    code = "from axlearn_core.cli.main import cli; cli(prog_name='axlearn')"
    result = subprocess.run([sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True)
    assert f"_AXLEARN_COMPLETE={shell}_complete" in result.stdout
    if shell == "bash" and shutil.which("bash"):
        assert subprocess.run(["bash", "-n"], input=result.stdout, text=True).returncode == 0
