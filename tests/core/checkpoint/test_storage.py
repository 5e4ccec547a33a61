import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import pytest

from axlearn_core.checkpoint import LocalStorage
from axlearn_core.checkpoint.storage import resolve
from axlearn_core.contracts.storage import StoredFile
from axlearn_core.errors import PluginError, RequestError, StorageError
from axlearn_core.plugins.manager import host
from axlearn_core.plugins.registry import Registry

BUCKET = """
from pathlib import Path
from axlearn_core.checkpoint import LocalStorage
from axlearn_core.plugins.hookspecs import hookimpl

@hookimpl
def axlearn_checkpoint_storage(uri):
    return LocalStorage(Path({root!r}) / uri.removeprefix("bucket://")) if uri.startswith("bucket://") else None
"""


@pytest.fixture
def bucket(install, tmp_path):
    def make(name: str) -> None:
        module = f"{name}_storage"
        source = BUCKET.format(root=str(tmp_path / name))
        install(f"axlearn-plugins-{name}", modules={module: source}, points={"plugins": {name: module}})

    return make


def test_paths_and_file_uris_are_the_core_s(tmp_path):
    assert resolve(str(tmp_path / "a b")) == tmp_path / "a b"
    assert resolve((tmp_path / "a b").as_uri()) == tmp_path / "a b"
    assert resolve("~/x") == Path.home() / "x"
    assert not (tmp_path / "a b").exists()


def test_a_plugin_stores_its_scheme(bucket, tmp_path):
    bucket("one")
    assert resolve("bucket://run", host(Registry())) == tmp_path / "one" / "run"


def test_an_unknown_scheme_names_what_there_is(bucket):
    bucket("one")
    with pytest.raises(
        RequestError,
        match=r"'s4' is unknown[^$]*file:// \(axlearn-core\); [^$]*the schemes of one \(axlearn-plugins-one",
    ):
        resolve("s4://bucket/run", host(Registry()))


EARLIER = """
from axlearn_core.plugins.hookspecs import hookimpl

class Drawer:
    def list(self, prefix=""):
        return []

    write = read = read_into = commit = delete = directory = list

@hookimpl
def axlearn_checkpoint_storage(uri):
    return Drawer() if uri.startswith("drawer://") else None
"""


def test_a_storage_of_an_earlier_contract_is_refused_by_what_it_lacks(install):
    install("axlearn-plugins-drawer", modules={"drawer": EARLIER}, points={"plugins": {"drawer": "drawer"}})
    with pytest.raises(PluginError, match=r"drawer://, drawer.Drawer, lacks create, list_names, staging"):
        resolve("drawer://x", host(Registry()))


def test_two_claims_name_both(bucket):
    bucket("one")
    bucket("two")
    with pytest.raises(PluginError, match=r"one of axlearn-plugins-one[^$]*two of axlearn-plugins-two"):
        resolve("bucket://run", host(Registry()))


def test_the_checkpointer_goes_where_its_uri_says(make, tmp_path):
    one = make(uri=(tmp_path / "elsewhere").as_uri())
    one.save(1, {"x": jnp.ones(2)})
    one.wait()
    assert (tmp_path / "elsewhere" / "1" / "manifest.json").exists()
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.slow
def test_folders_that_are_renamed_meanwhile_hurt_no_listing(tmp_path):
    """As checkpoints are, by the thread that saves them while the trainer lists them."""
    storage = LocalStorage(tmp_path)
    storage.write("kept/a", [b"1"])
    over = threading.Event()

    def rename():
        for number in range(300):
            for name in ("x/y/b", "x/z/c"):
                storage.write(f"new/{name}", [b"22"])
            storage.commit("new", f"old-{number}")
            storage.delete(f"old-{number}")
        over.set()

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(rename)
        count = 0
        while not over.is_set() and not result.done():
            assert StoredFile("kept/a", 1) in storage.list()
            count += 1
        result.result()
    assert count > 10


@pytest.mark.skipif(os.geteuid() == 0, reason="needs a user other than root, who can read everything")
def test_a_folder_that_cannot_be_read_is_an_error_of_the_listing(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o000)
    with pytest.raises(StorageError, match="closed"):
        LocalStorage(tmp_path).list()


def test_a_listing_looks_only_where_its_prefix_may_be(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path)
    for name in ("a/1", "a/b/2", "ab/3", "ac", "other/deep/4"):
        storage.write(name, [b"x"])
    looked: list[str] = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (looked.append(os.path.relpath(path, tmp_path)), scan(path))[1])
    for prefix, expected in {
        "": ["a/1", "a/b/2", "ab/3", "ac", "other/deep/4"], "a": ["a/1", "a/b/2", "ab/3", "ac"], "a/": ["a/1", "a/b/2"],
        "a/b": ["a/b/2"], "ab": ["ab/3"], "none": [], "none/": [],
    }.items():  # fmt: skip
        assert [file.path for file in storage.list(prefix)] == expected, prefix
    looked.clear()
    storage.list("ab")
    assert looked == [".", "ab"]
