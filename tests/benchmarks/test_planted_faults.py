"""The planted faults: the list matches the code, and the stored results cover it."""

import importlib
import subprocess
import sys

import pytest

from axlearn_index.build import workspace_members
from support.paths import ROOT


@pytest.fixture
def planted_faults(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("planted_faults")


def test_each_text_occurs_once_in_its_file(planted_faults):
    counts = {f.name: (ROOT / f.file).read_text("utf-8").count(f.old) for f in planted_faults.read_faults()}
    assert {name: count for name, count in counts.items() if count != 1} == {}


def test_faults_have_different_names_and_change_the_code(planted_faults):
    faults = planted_faults.read_faults()
    assert len({f.name for f in faults}) == len(faults)
    assert [f.name for f in faults if f.old == f.new] == []


def test_every_distribution_has_a_fault(planted_faults):
    files = [f.file for f in planted_faults.read_faults()]
    folders = [str(folder.relative_to(ROOT)) for folder in workspace_members(ROOT) if (folder / "src").exists()]
    assert folders
    assert [folder for folder in folders if not any(file.startswith(f"{folder}/src/") for file in files)] == []


def test_tests_of_faults_exist(planted_faults):
    named = {path.partition("::")[0] for f in planted_faults.read_faults() for path in f.tests}
    caught_by = {
        result["test"].partition("::")[0] for result in planted_faults.read_results().values() if result["test"]
    }
    assert [path for path in sorted(named | caught_by) if not (ROOT / path).exists()] == []


def test_tests_catch_every_fault_and_most_by_default(planted_faults):
    names = {f.name for f in planted_faults.read_faults()}
    results = planted_faults.read_results()
    assert results.keys() == names
    kinds = [result["by"] for result in results.values()]
    assert "nothing" not in kinds
    assert kinds.count("default") >= 0.95 * len(kinds)


def test_the_table_shows_the_results(planted_faults):
    table = planted_faults.render_table(planted_faults.read_faults(), planted_faults.read_results())
    assert planted_faults.TABLE.read_text("utf-8") == table


def test_a_fault_is_planted_and_removed(planted_faults, tmp_path):
    (tmp_path / "part.py").write_text("total = 1 + 2\n")
    fault = planted_faults.Fault(name="subtracts", file="part.py", old="1 + 2", new="1 - 2", tests=[])
    with planted_faults.planted(fault, tmp_path):
        assert (tmp_path / "part.py").read_text() == "total = 1 - 2\n"
    assert (tmp_path / "part.py").read_text() == "total = 1 + 2\n"
    (tmp_path / "part.py").write_text("total = 1 + 2 + (1 + 2)\n")
    with pytest.raises(ValueError, match="contains its text 2 times"), planted_faults.planted(fault, tmp_path):
        pass


EXAMINE = """
import planted_faults as p
fault = next(f for f in p.read_faults() if "rate zero" in f.name)
with p.copied_tree() as tree:
    p.check_imports(tree)
    p.import_libraries(tree)
    result = p.examine(fault, tree)
    p.confirm({fault.name: result}, tree)
    print(result)
"""


@pytest.mark.slow
def test_a_fault_in_a_copy_of_the_tree_is_caught():
    process = subprocess.run(
        [sys.executable, "-c", EXAMINE], cwd=ROOT / "benchmarks", check=True, capture_output=True, text=True
    )
    assert "'by': 'default', 'test': 'tests/core/learn/test_schedules.py::" in process.stdout
