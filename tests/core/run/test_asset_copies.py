"""Copies of a run's files: read, written, found behind a storage, and compared with what a request names."""

import os
import stat
from pathlib import Path

import pytest

from axlearn_core.checkpoint import LocalStorage
from axlearn_core.config import Configurable, node, setting
from axlearn_core.errors import CheckpointError, ConfigError, MissingFileError
from axlearn_core.run import asset_copies as module
from axlearn_core.run.asset_copies import (
    align_assets,
    attach_assets,
    collect_assets,
    hash_asset_paths,
    recover_assets,
    write_assets,
)


class Vocabulary(Configurable):
    @node
    class Config(Configurable.Config["Vocabulary"]):
        path: str | None = setting(default=None, asset=True, siblings=("merges.txt", "none.txt"))


class Root(Configurable):
    @node
    class Config(Configurable.Config["Root"]):
        vocabulary: Vocabulary.Config = Vocabulary.Config()


class Bucket:
    """A storage without a directory."""

    def __init__(self, files):
        self.files, self.reads = dict(files), 0

    def list(self, prefix=""):
        from axlearn_core.contracts.storage import StoredFile

        return sorted(StoredFile(n, len(c)) for n, c in self.files.items() if n.startswith(prefix))

    def read(self, path):
        self.reads += 1
        if path not in self.files:
            raise MissingFileError(path)
        return self.files[path]

    def write(self, path, chunks):
        self.files[path] = b"".join(chunks)


@pytest.fixture
def vocabulary(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/merges.txt").write_bytes(b"merges \xff")
    (tmp_path / "data/v.json").write_bytes(b"one")
    return tmp_path / "data/v.json"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    module.cache_folder.cache_clear()
    yield tmp_path / "cache/axlearn/assets"
    module.cache_folder.cache_clear()


def tree(path):
    return Root.Config(vocabulary=Vocabulary.Config(path=str(path)))


def stored_run(vocabulary, folder):
    config, files = collect_assets(tree(vocabulary))
    write_assets(LocalStorage(folder), files)
    (folder / "config.yaml").touch()
    return config


def test_a_file_comes_with_its_neighbors(vocabulary, tmp_path, monkeypatch):
    config, files = collect_assets(tree(vocabulary))
    assert config == tree("run:files/vocabulary/v.json")
    assert files == {"files/vocabulary/v.json": b"one", "files/vocabulary/merges.txt": b"merges \xff"}
    monkeypatch.chdir(vocabulary.parent)
    assert collect_assets(tree("v.json")) == (config, files)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert collect_assets(tree("~/data/v.json")) == (config, files)


def test_a_file_that_cannot_be_read(tmp_path, caplog):
    with pytest.raises(ConfigError, match=r"vocabulary.path: cannot be read: No such file[\s\S]*got[\s\S]*fix"):
        collect_assets(tree(tmp_path / "gone.json"))
    assert collect_assets(tree(tmp_path / "gone.json"), required=False) == (tree(tmp_path / "gone.json"), {})
    assert collect_assets(tree("unknown://b/v.json")) == (tree("unknown://b/v.json"), {})
    assert [m.partition(" (")[0] for m in caplog.messages] == [
        f"note: vocabulary.path stays outside the run: {tmp_path / 'gone.json'}",
        "note: vocabulary.path stays outside the run: unknown://b/v.json",
    ]


def test_a_copy_that_is_the_same_is_left_alone(vocabulary, tmp_path):
    run = tmp_path / "run"
    stored_run(vocabulary, run)
    copy = run / "files/vocabulary/v.json"
    os.utime(copy, (1, 1))
    stored_run(vocabulary, run)
    assert copy.stat().st_mtime == 1
    vocabulary.write_bytes(b"two")
    stored_run(vocabulary, run)
    assert copy.read_bytes() == b"two"


def test_a_run_behind_a_storage_is_read_through_a_private_cache(vocabulary, cache):
    config, files = collect_assets(tree(vocabulary))
    bucket = Bucket({f"a/run/{name}": content for name, content in files.items()})
    attached = attach_assets(config, "b://a/run/config.yaml", [(bucket, "other/"), (bucket, "a/run/")])
    path = Path(attached.vocabulary.path)
    assert path.parent.parent == cache
    assert path.read_bytes() == b"one"
    assert (path.parent / "merges.txt").read_bytes() == b"merges \xff"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.write_bytes(b"other")  # damaged, or edited: the run decides
    assert attach_assets(config, "b://a/run", [(bucket, "a/run/")]) == attached
    assert path.read_bytes() == b"one"
    bucket.files["a/run/files/vocabulary/v.json"] = b"new"
    assert attach_assets(config, "b://a/run", [(bucket, "a/run/")]) != attached
    del bucket.files["a/run/files/vocabulary/v.json"]
    with pytest.raises(
        CheckpointError, match=r"b://a/run refers to files that its run does not have[\s\S]*expected[\s\S]*fix"
    ):
        attach_assets(config, "b://a/run", [(bucket, "a/run/")])


def test_an_earlier_run_in_a_bucket(caplog):
    bucket = Bucket({"v.json": b"one", "huggingface/v.json": b"one", "huggingface/merges.txt": b"m"})
    attached = attach_assets(tree("/gone/v.json"), "b://run", [(bucket, "")]).vocabulary.path
    assert sorted(os.listdir(os.path.dirname(attached))) == ["merges.txt", "v.json"]
    del bucket.files["huggingface/v.json"]
    attached = attach_assets(tree("/gone/v.json"), "b://run", [(bucket, "")]).vocabulary.path
    assert os.listdir(os.path.dirname(attached)) == ["v.json"]


def test_a_file_is_the_same_setting_as_its_copy(vocabulary, tmp_path):
    config = stored_run(vocabulary, tmp_path / "run")
    stored = attach_assets(config, "run", [(LocalStorage(tmp_path / "run"), "")])
    assert stored != tree(vocabulary)
    assert align_assets(stored, tree(vocabulary)) == tree(vocabulary)
    vocabulary.write_bytes(b"two")
    assert align_assets(stored, tree(vocabulary)) == stored
    assert recover_assets(tree(vocabulary), stored) == (tree(vocabulary), [])
    vocabulary.unlink()
    assert align_assets(stored, tree(vocabulary)) == stored
    recovered, (note,) = recover_assets(tree(vocabulary), stored)
    assert recovered == stored
    assert f"{vocabulary} does not exist; using the run's copy" in note
    other = tree(tmp_path / "data/w.json")  # another name: nobody said that it is this one
    assert recover_assets(other, stored) == (other, [])
    assert recover_assets(other, None) == (other, [])


def test_equal_runs_are_named_alike_wherever_they_lie(vocabulary, tmp_path):
    places = [tmp_path / "one", tmp_path / "two"]
    configs = [attach_assets(stored_run(vocabulary, p), "run", [(LocalStorage(p), "")]) for p in places]
    assert configs[0] != configs[1]
    assert hash_asset_paths(configs[0]) == hash_asset_paths(configs[1])
    assert hash_asset_paths(tree(vocabulary)) == tree(vocabulary)
