"""Each skipped test tells what would run it."""

import ast
from pathlib import Path

import pytest

from support import needs
from support.paths import ROOT

pytestmark = pytest.mark.style

SKIPS = {"pytest.skip", "pytest.mark.skip", "pytest.mark.skipif", "pytest.importorskip"}
HELPERS = {"reason", "needs.reason"}
"""Functions whose result begins with `needs`."""
FILES = [
    path
    for folder in ("tests", "examples", "axlearn_testing", "plugins")
    for path in (ROOT / folder).rglob("*.py")
    if ".venv" not in path.parts
]


def _begins_with_needs(node):
    """Return whether an expression is a text that begins with `needs`."""
    if isinstance(node, ast.Constant):
        return str(node.value).startswith("needs ")
    if isinstance(node, ast.JoinedStr):
        return bool(node.values) and _begins_with_needs(node.values[0])
    if isinstance(node, ast.FormattedValue):
        return _begins_with_needs(node.value)
    if isinstance(node, ast.BinOp):
        return _begins_with_needs(node.left)
    return isinstance(node, ast.Call) and ast.unparse(node.func) in HELPERS


def unexplained(source):
    """Yield the line and code of each skip whose reason does not begin with `needs`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in SKIPS:
            words = [k.value for k in node.keywords if k.arg == "reason"]
            words += node.args[:1] if name in ("pytest.skip", "pytest.mark.skip") else []
            if not words or not _begins_with_needs(words[0]):
                yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize(
    "planted",
    [
        "pytest.skip()",
        "pytest.skip('no GPU')",
        "pytest.skip(str(error))",
        "pytest.skip(f'{error} needs it')",
        "pytest.importorskip('torch')",
        "@pytest.mark.skip\n@pytest.mark.skipif(True, reason='Linux')\ndef test(): ...",
    ],
)
def test_a_skip_without_a_remedy_is_reported(planted):
    assert len(list(unexplained(f"import pytest\n{planted}"))) == 1


@pytest.mark.parametrize(
    "reason",
    ["'needs root'", "f'needs a {device}'", "'needs a ' + device", "reason('torch')", "f\"{reason('a')} (b)\""],
)
def test_a_skip_with_a_remedy_is_not_reported(reason):
    assert not list(unexplained(f"pytest.skip({reason})\npytest.mark.skipif(1 > 2, reason={reason})"))


def test_every_skip_tells_what_would_run_the_test():
    texts = {path: path.read_text() for path in FILES}
    skipping = {path: text for path, text in texts.items() if "skip" in text}
    assert len(skipping) > 50
    assert {
        f"{p.relative_to(ROOT)}:{line} {code}" for p, t in skipping.items() for line, code in unexplained(t)
    } == set()


def test_the_reason_is_a_command_for_this_file():
    file = Path(__file__).relative_to(ROOT)
    assert needs.reason("libtpu") == f"needs libtpu: uv run --all-packages pytest {file}"
    assert needs.reason("torch", "peft") == f"needs torch and peft: uv run --group parity pytest {file}"


def test_a_missing_package_skips_and_an_installed_one_is_imported():
    assert needs.needs("no_such_package", "json").args == (True,)
    assert needs.needs("no_such_package.part").args == (True,)
    assert needs.needs("json", "pytest").args == (False,)
    assert needs.require("json").dumps([]) == "[]"
    with pytest.raises(
        pytest.skip.Exception, match="needs no_such_package: uv run --all-packages pytest tests/test_skip"
    ):
        needs.require("no_such_package")
