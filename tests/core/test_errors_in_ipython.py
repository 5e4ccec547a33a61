"""How errors of requests look in IPython and Jupyter."""

import pytest

from axlearn_core.errors import ConfigError, Problem, RequestError


@pytest.fixture
def shell(monkeypatch):
    """An IPython shell, whose output is what `capsys` reads."""
    pytest.importorskip("IPython", reason="needs IPython")
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    options = Config({"HistoryManager": {"enabled": False}})
    shell = InteractiveShell.instance(config=options, colors="nocolor")
    yield shell
    InteractiveShell.clear_instance()


CELL = """
def outer(error):
    raise error

outer(error)
"""


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (
            RequestError("unknown experiment 'x'\n    fix: y\x1b[2J"),
            ["RequestError: unknown experiment 'x'", "    fix: y\\x1b[2J"],
        ),
        (ConfigError([Problem(path="a.b", message="is missing")]), ["ConfigError: a.b: is missing"]),
    ],
)
def test_the_message_stands_alone_and_the_traceback_stays_reachable(error, lines, shell, capsys):
    shell.user_ns["error"] = error
    shell.run_cell(CELL, store_history=True)
    shown = capsys.readouterr().out
    assert shown.split("\n")[: len(lines)] == lines
    assert "outer" not in shown
    assert "%tb" in shown
    assert shell.user_ns["error"].__traceback__ is not None  # for %debug
    shell.run_cell("%tb", store_history=True)
    traceback = capsys.readouterr().out
    assert "in outer(error)" in traceback
    assert lines[0].partition(": ")[2] in traceback


def test_other_errors_have_a_traceback(shell, capsys):
    shell.user_ns["error"] = ValueError("wrong")
    shell.run_cell(CELL, store_history=True)
    assert "in outer(error)" in capsys.readouterr().out
