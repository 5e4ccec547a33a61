"""The benchmark of input, on little text: passes come to their end, and a position in the middle is gone on from."""

import importlib

import numpy as np
import pytest

from support.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def input_speed(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("input_speed")


@pytest.mark.fast_cases("ours")
@pytest.mark.parametrize("system", ["ours", "grain"])
def test_a_pass_has_the_tokens_of_the_files(input_speed, tmp_path, system):
    tokens = input_speed.write(tmp_path / "few", 0.1, 6)
    assert len(list((tmp_path / "few").glob("*.jsonl"))) == 6
    assert 0.1 * 2**20 / 5 < tokens < 0.1 * 2**20
    result = input_speed.measure(system, tmp_path / "few", 0, tokens)
    assert tokens <= result["tokens"] < tokens + input_speed.BATCH * input_speed.LENGTH
    assert result["first_batch_seconds"] > 0


def test_systems_read_the_same_text(input_speed, tmp_path):
    input_speed.write(tmp_path / "one", 0.02, 1)
    read = []
    for system in ("ours", "grain"):
        batches = input_speed.SYSTEMS[system](sorted((tmp_path / "one").glob("*.jsonl")), 0)
        read.append(np.unique(np.concatenate([next(batches)["tokens"].ravel() for _ in range(16)])))
        batches.close()
    assert read[0].tolist() == read[1].tolist()


def test_many_files_go_on_where_they_were(input_speed, tmp_path, monkeypatch):
    monkeypatch.setattr(input_speed, "EARLY", 3)
    monkeypatch.setattr(input_speed, "LATE", 8)
    input_speed.write(tmp_path / "many", 0.1, 40)
    result = input_speed.many_files(tmp_path / "many")
    assert result["files"] == 40
    assert result["same_batches"] is True
