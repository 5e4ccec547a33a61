"""What `axlearn --help` says of plugins' commands, none of them imported."""

import sys

import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_core.cli.summaries import summary

MODULE = '''
raise RuntimeError("imported")

@decorated
def command():
    """Grow a bean.

    More of it.
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
    assert "bean_field" not in sys.modules


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
