from pathlib import Path

import jax.numpy as jnp
import pytest

from axlearn_core.checkpoint.storage import resolve
from axlearn_core.errors import PluginError, RequestError
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
        RequestError, match=r"'s4' is unknown[^$]*file:// \(the core\); [^$]*what one \(axlearn-plugins-one"
    ):
        resolve("s4://bucket/run", host(Registry()))


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
