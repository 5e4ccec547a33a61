"""The planted faults of composition: the list matches the code, and the stored results cover it."""

import importlib

import pytest

from axlearn_core.plugins.resolve import resolve
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
    proofs = planted_compositions.read_results(planted_compositions.PROOFS)
    assert planted_compositions.TABLE.read_text("utf-8") == planted_compositions.render_table(faults, results, proofs)
    names = [name for name, result in results.items() if result["found"] and result["named"] and result["clean"]]
    assert len(names) >= 0.95 * len(faults)


def test_stored_proofs_find_the_faults_among_other_features(planted_compositions):
    faults = {f.name: f for f in planted_compositions.read_faults()}
    proofs = planted_compositions.read_results(planted_compositions.PROOFS)
    assert set(proofs) <= set(faults)
    assert all(len(proof["added"]) in (2, 3) for proof in proofs.values())
    wrong = [n for n, proof in proofs.items() if not all(proof[key] for key in planted_compositions.PROVEN)]
    assert len(wrong) <= 0.1 * len(proofs)


@pytest.mark.slow
def test_added_features_fit_the_config_and_depend_only_on_the_fault(planted_compositions):
    fault = next(f for f in planted_compositions.read_faults() if f.experiment == "gpt2-124m")
    added = planted_compositions.add_features(fault)["added"]
    assert len(added) in (2, 3)
    assert set(added) <= set(planted_compositions.UNRELATED)
    assert planted_compositions.add_features(fault)["added"] == added
    resolve(fault.experiment, with_=[*fault.features, *added], set=fault.settings)


def test_a_fault_is_proven(planted_compositions, tmp_path, monkeypatch):
    """The proofs run in forks, so they are replaced here."""
    fault = planted_compositions.read_faults()[0]
    file = tmp_path / fault.file
    file.parent.mkdir(parents=True)
    file.write_text(f"# {fault.old}\n")
    place = {"difference": {"layer": fault.layer, "tensor": "output", "detail": ""}, "error": 0.5, "reason": ""}
    failed = {"name": "causality", "status": "FAILS", **place}
    minimal = {"command": "axlearn prove quickstart", "features": ["moe"], "complete": True, "check": failed}
    codes = []

    def run_forked(tree, call, *arguments):
        planted = fault.new in file.read_text()
        if call is planted_compositions.add_features:
            return {"added": ["ema", "remat"]}
        if call is planted_compositions.prove:
            assert planted
            assert arguments == (fault, ["ema", "remat"])
            return {"checks": [failed, {"name": "decode", "status": "holds"}], "minimal": minimal}
        assert not planted
        assert arguments == (["prove", "quickstart"],)
        return {"code": codes[-1], "output": ""}

    monkeypatch.setattr(planted_compositions, "run_forked", run_forked)
    codes.append(0)
    result = planted_compositions.examine_proof(fault, tmp_path)
    assert (result["failed"], result["left"], result["layer"]) == (["causality"], ["moe"], fault.layer)
    assert [result[key] for key in planted_compositions.PROVEN] == [True, True, True]
    codes.append(1)
    assert not planted_compositions.examine_proof(fault, tmp_path)["found"], "it also fails without the fault"
    minimal["features"] = ["moe", "ema"]
    assert not planted_compositions.examine_proof(fault, tmp_path)["minimal"], "an added feature is left"


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
