"""Directories that appear in one piece."""

import os

import pytest

from axlearn_core.errors import WorkError
from axlearn_core.run.derive import create_directory


def fill(out):
    with create_directory(out) as partial:
        assert not (out / "config.yaml").exists()
        (partial / "config.yaml").write_text("a run")
        (partial / "checkpoints").mkdir()


@pytest.mark.parametrize("place", ["new", "deeper/new", "empty", "link", "."])
def test_a_run_appears_wherever_there_is_none(tmp_path, monkeypatch, place):
    for name in ("empty", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("empty")
    monkeypatch.chdir(tmp_path / "here" if place == "." else tmp_path)
    out = tmp_path.__class__(place)
    fill(out)
    assert sorted(os.listdir(out)) == ["checkpoints", "config.yaml"]
    assert os.path.samefile(out, os.path.realpath(place))
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("exists", [True, False])
def test_of_what_was_cut_off_nothing_is_left(tmp_path, exists):
    out = tmp_path / "run"
    if exists:
        out.mkdir()

    def stopped():
        with create_directory(out) as partial:
            (partial / "config.yaml").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert list(tmp_path.rglob("*")) == ([out] if exists else [])


def test_the_file_that_cannot_be_read_or_written_is_named(tmp_path):
    message = r"cannot write .*run: No such file or directory \(.*missing\)"
    with pytest.raises(WorkError, match=message), create_directory(tmp_path / "run"):
        (tmp_path / "missing").read_text()
