"""Summaries of plugin commands in `axlearn --help`, which imports none of them."""

import io
import re
import sys

import pytest
from click.testing import CliRunner

from axlearn_core.cli.common import print_table
from axlearn_core.cli.main import cli
from axlearn_core.cli.summaries import parameter_count, summary
from axlearn_core.plugins.registry import registry

MODULE = '''
raise RuntimeError("imported")

@decorated
def command():
    """Grow a bean.

    More of it.
    """

class Field:
    """Hold beans.

    About 2.5B parameters, of which 1.1B parameters are beans.
    """

def bare():
    pass

built = command
'''


@pytest.fixture
def beans(install):
    points = {"commands": {"grow": "bean_field:command", "built": "bean_field:built"}}
    install("axlearn-plugins-beans", modules={"bean_field": MODULE}, points=points)


def test_the_first_line_of_the_docstring(beans):
    assert summary("bean_field:command") == "Grow a bean."
    assert summary("bean_field:Field") == "Hold beans."
    assert parameter_count("bean_field:Field") == "2.5B"
    assert parameter_count("bean_field:command") is None
    assert "bean_field" not in sys.modules


def rounded(count: int) -> str:
    unit, divisor = next((u, d) for u, d in (("T", 1e12), ("B", 1e9), ("M", 1e6)) if count >= d or u == "M")
    return f"{count / divisor:.3g}{unit}"


@pytest.mark.fast_cases("llama2-7b", "llama3-8b", "mistral-7b", "mixtral-8x7b", "quickstart", "vit-b16")
@pytest.mark.parametrize("name", sorted(registry().claims["experiments"]))
def test_the_docstring_of_an_experiment_gives_its_number_of_parameters(name):
    from axlearn_core.compose.functional import count_parameters

    entry = registry().entry("experiments", name)
    assert summary(entry.value)
    assert parameter_count(entry.value) == rounded(count_parameters(entry.load()().model))


@pytest.mark.parametrize("name", sorted(registry().claims["features"]))
def test_every_feature_has_a_summary(name):
    assert summary(registry().entry("features", name).value)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_the_last_column_wrapped_and_a_pipe_does_not(monkeypatch):
    rows = [{"name": "a", "summary": "one two three " * 6}, {"name": "bb", "summary": "short"}]
    monkeypatch.setenv("COLUMNS", "40")
    for stream, lines in ((Terminal(), 5), (io.StringIO(), 3)):
        monkeypatch.setattr(sys, "stdout", stream)
        print_table(rows, ("name", "summary"))
        printed = re.sub(r"\x1b\[\d*m", "", stream.getvalue()).splitlines()
        assert len(printed) == lines, printed
        assert lines == 3 or all(len(line) <= 40 for line in printed)
        assert lines == 3 or printed[2].startswith("      one two") or printed[2].startswith("      t")
        assert printed[-1] == "bb    short"


@pytest.mark.parametrize(
    "value", ["bean_field:bare", "bean_field:built", "bean_field:no", "no_such.module:x", "json:dumps.x"]
)
def test_where_there_is_none(beans, value):
    assert summary(value) is None


def test_a_file_that_is_no_python(install):
    install("axlearn-plugins-bad", modules={"bad_words": "def ("})
    assert summary("bad_words:command") is None


def test_help_lists_it(beans, monkeypatch):
    text = CliRunner().invoke(cli, ["--help"]).output
    assert "grow " in text
    assert "Grow a bean." in text
    assert "(axlearn-plugins-beans 1.0)" in text, "for what has no docstring of its own"


def test_every_command_of_this_repository_has_a_line():
    text = CliRunner().invoke(cli, ["--help"]).output
    assert "(axlearn-plugins-" not in text, text
