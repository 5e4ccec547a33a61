"""The tables of slots in the docs are what the sources say."""

import ast
import re
import tomllib

import pytest

import axlearn_plugins_rl.testing
import axlearn_plugins_serving.testing
import axlearn_plugins_transformer.attention_variants.testing
import axlearn_plugins_transformer.testing
import axlearn_testing
from support.paths import ROOT

PARTS = ROOT / "examples/my_parts"
SOURCES = [p for folder in ("axlearn_core/src", "plugins") for p in (ROOT / folder).rglob("*.py") if "src" in p.parts]
MODULES = (
    axlearn_testing,
    axlearn_plugins_rl.testing,
    axlearn_plugins_transformer.testing,
    axlearn_plugins_transformer.attention_variants.testing,
    axlearn_plugins_serving.testing,
)
HEAD = "| slot | protocol | is offered |"
PAGES = sorted(p for p in (ROOT / "docs").glob("*.md") if HEAD in p.read_text("utf-8"))


def rows():
    """Protocol -> (names that are offered, suite, example) of each row. A table may lack the last columns: None."""
    cells = []
    for page in PAGES:
        text = page.read_text("utf-8")
        table = text[text.index(HEAD) :].partition("\n\n")[0].splitlines()[2:]
        cells += [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {
        protocol.strip("`"): (set(re.findall(r"`(\w+)`", offered)), suite and suite.strip("`"), example)
        for _, protocol, offered, suite, example in ((*row, None, None)[:5] for row in cells)
    }


def declared():
    """Protocol -> names, of every class that is decorated with `@offers(...)`."""
    texts = (path.read_text("utf-8") for path in SOURCES)
    return {
        node.name: {ast.literal_eval(name) for name in decorator.args}
        for text in texts
        if "@offers(" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", None) == "offers"
    }


def test_the_tables_have_every_protocol_that_says_what_it_offers():
    slots = {protocol: names for protocol, (names, _, _) in rows().items()}
    assert {"Checkpointer", "Evaluator", "Loop"} <= declared().keys()
    assert {protocol: slots.get(protocol) for protocol in declared()} == declared()


@pytest.mark.parametrize("protocol", [name for name, (_, suite, _) in rows().items() if suite is not None])
def test_a_row_names_a_suite(protocol):
    _, suite, _ = rows()[protocol]
    assert any(suite in m.__all__ for m in MODULES), suite


@pytest.mark.parametrize("protocol", [name for name, (_, _, example) in rows().items() if example is not None])
def test_a_row_names_an_example_that_uses_its_suite(protocol):
    _, suite, example = rows()[protocol]
    file = (ROOT / "docs" / re.fullmatch(r"\[\w+\.py\]\((.*)\)", example).group(1)).resolve()
    assert file.is_file()
    tests = "".join(p.read_text("utf-8") for p in (file.parents[2] / "tests").glob("test_*.py"))
    assert f"({suite}):" in tests, f"the tests of the example do not use {suite}"


def test_every_suite_has_a_row():
    suites = {suite for _, suite, _ in rows().values()}
    every = {n for m in MODULES for n in m.__all__ if "Suite" in n}
    # A feature is not in a slot, and recurrent layers share theirs with attention.
    assert every - suites == {"FeatureSuite", "RecurrentSuite"}


def test_every_component_of_the_example_has_its_module():
    project = tomllib.loads((PARTS / "pyproject.toml").read_text())["project"]
    for path in project["entry-points"]["axlearn.components"].values():
        module, _, name = path.partition(":")
        tree = ast.parse((PARTS / "src" / f"{module.replace('.', '/')}.py").read_text())
        assert name in {n.name for n in tree.body if isinstance(n, ast.ClassDef)}, path
