"""`axlearn_core.extend`: what plugins use is in one place, is documented, and is what the examples use."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from axlearn_core import extend
from support.paths import ROOT

EXAMPLES = sorted(ROOT.glob("examples/*/src/**/*.py"))
ALLOWED = ("axlearn_core", "axlearn_core.extend", "axlearn_testing")


@pytest.mark.parametrize("name", extend.__all__)
def test_each_name_is_there(name):
    assert getattr(extend, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Featur'"):
        _ = extend.Featur


def test_type_checkers_see_the_names_that_are_there():
    tree = ast.parse(Path(extend.__file__).read_text("utf-8"))
    block = next(s for s in tree.body if isinstance(s, ast.If))
    imported = {(s.module.removeprefix("axlearn_core."), a.name) for s in block.body for a in s.names}
    assert imported == {(module, name) for module, names in extend._MODULES.items() for name in names}


def test_hooks_that_use_it_import_no_jax():
    names = "CommandOption, KernelImplementation, MeshRule, Migration, RematPolicy, Storage, Target, hookimpl"
    code = f"import sys\nfrom axlearn_core.extend import {names}\nassert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_page_lists_every_name():
    text = (ROOT / "docs/stability.md").read_text("utf-8")
    table = text.partition("| topic | names |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", table)) == extend.__all__


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parents[2].name}/{path.name}")
def test_the_examples_need_nothing_else_of_the_core(path):
    nodes = [n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.ImportFrom)]
    modules = {n.module for n in nodes if (n.module or "").startswith("axlearn_core")}
    assert modules <= set(ALLOWED)
