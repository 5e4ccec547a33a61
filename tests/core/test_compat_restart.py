"""Commands that train start anew with settings of the C library that are read when a process starts: real processes."""

import os
import subprocess
import sys

import pytest

from axlearn_core.compat import TUNABLES

pytestmark = pytest.mark.skipif(
    "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", {}), reason="needs Linux with glibc"
)
PROGRAM = """
import os, sys
{before}
print("begins as", os.getpid(), flush=True)
from axlearn_core.cli import main
variables = dict(os.environ)
main.cli = lambda prog_name: print("goes on", variables.get("GLIBC_TUNABLES"), *sys.argv[1:])
main.main()
"""


def run(*words: str, before: str = "", tunables: str | None = None) -> tuple[list[str], int]:
    """What the program printed, and how often it began."""
    environment = {k: v for k, v in os.environ.items() if k not in ("GLIBC_TUNABLES", "AXLEARN_RESTARTED")}
    environment |= {} if tunables is None else {"GLIBC_TUNABLES": tunables}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(before=before), *words],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    *begins, end = output.splitlines()
    assert set(begins) == {f"begins as {process.pid}"}
    return end.split(), len(begins)


@pytest.mark.parametrize("command", ["train", "bench"])
def test_a_training_command_reexecutes_itself_once_with_its_arguments(command):
    words = [command, "quickstart", "--set", "a=b"]
    assert run(*words) == (["goes", "on", ":".join(TUNABLES), *words], 2)


@pytest.mark.parametrize("words", [[], ["--help"], ["plan", "train"], ["serve", "x"]])
def test_other_commands_do_not(words):
    assert run(*words) == (["goes", "on", "None", *words], 1)


def test_what_the_user_sets_stays():
    end, begins = run("train", tunables="glibc.malloc.hugetlb=0")
    assert (end[2], begins) == (f"glibc.malloc.hugetlb=0:{TUNABLES[1]}", 2)
    assert run("train", tunables=":".join(TUNABLES)) == (["goes", "on", ":".join(TUNABLES), "train"], 1)


def test_a_python_that_loses_the_variable_goes_on():
    # As the C library does for a program with capabilities.
    assert run("train", before="os.environ.pop('GLIBC_TUNABLES', None)") == (["goes", "on", "None", "train"], 2)


def test_children_get_the_environment_of_the_user():
    program = PROGRAM.replace("variables = dict(os.environ)", "variables = os.environ")
    for users in ({}, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}):
        environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"} | users
        command = [sys.executable, "-c", program.format(before=""), "train"]
        output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        assert output.splitlines()[-1].split() == ["goes", "on", *(users.values() or ["None"]), "train"]


@pytest.mark.parametrize(
    "before",
    ["sys.settrace(lambda *_: None)", "sys.executable = None", "sys.argv[0] = '-'", "sys.argv[0] = ''"],
)
def test_what_cannot_begin_again_does_not(before):
    assert run("train", before=before) == (["goes", "on", "None", "train"], 1)


def test_a_program_that_has_begun_to_compute_is_not_started_anew():
    assert run("train", before="sys.modules['jax'] = None") == (["goes", "on", "None", "train"], 1)
