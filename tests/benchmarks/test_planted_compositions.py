"""The planted faults of composition: the list matches the code, and the stored results cover it."""

import importlib

import pytest

from support import proof_cases
from support.paths import ROOT


@pytest.fixture
def planted_compositions(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("planted_compositions")


def test_each_text_occurs_once_in_its_file(planted_compositions):
    faults = planted_compositions.read_faults()
    counts = {f.name: (ROOT / f.file).read_text("utf-8").count(f.old) for f in faults}
    assert {name: count for name, count in counts.items() if count != 1} == {}
    assert [f.name for f in faults if f.old == f.new] == []


def test_faults_have_different_names_and_installed_properties(planted_compositions):
    faults = planted_compositions.read_faults()
    assert len({f.name for f in faults}) == len(faults) >= 40
    for name in {f.checked for f in faults}:
        assert callable(proof_cases.load_property(name).check)


def test_the_faulty_files_are_valid(planted_compositions):
    for fault in planted_compositions.read_faults():
        text = (ROOT / fault.file).read_text("utf-8").replace(fault.old, fault.new)
        compile(text, fault.file, "exec")


def test_the_stored_results_cover_the_list(planted_compositions):
    faults, results = planted_compositions.read_faults(), planted_compositions.read_results()
    assert {f.name for f in faults} == set(results)
    assert planted_compositions.TABLE.read_text("utf-8") == planted_compositions.render_table(faults, results)
    names = [name for name, result in results.items() if result["found"] and result["named"] and result["clean"]]
    assert len(names) >= 0.95 * len(faults)


def test_a_fault_is_planted_and_examined(planted_compositions, tmp_path, monkeypatch):
    """The check itself runs in a fork, so it is replaced here."""
    fault = planted_compositions.read_faults()[0]
    file = tmp_path / fault.file
    file.parent.mkdir(parents=True)
    file.write_text(f"# {fault.old}\n")

    def check(fault, tree):
        holds = fault.new not in file.read_text()
        return {"holds": holds} if holds else {"holds": False, "layer": fault.layer, "tensor": "output", "error": "1"}

    monkeypatch.setattr(planted_compositions, "check", check)
    result = planted_compositions.examine(fault, tmp_path, {})
    assert result == {
        "found": True,
        "named": True,
        "clean": True,
        "layer": fault.layer,
        "tensor": "output",
        "error": "1",
    }
    assert file.read_text() == f"# {fault.old}\n", "the fault is gone"
    monkeypatch.setattr(planted_compositions, "check", lambda *_: {"crash": "no"})
    assert not planted_compositions.examine(fault, tmp_path, {})["found"], "a crash finds nothing"
