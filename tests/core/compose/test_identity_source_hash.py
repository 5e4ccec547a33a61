"""The hash of a package's code changes with all that is run of it."""

import importlib

import pytest

from axlearn_core.compose import identity


@pytest.mark.parametrize("file", ["module.py", "inner/module.py", "_native.abi3.so"])
def test_each_file_of_code_counts(file, tmp_path, monkeypatch):
    package = tmp_path / "hashed_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    hashes = [identity._hash_package("hashed_package")]
    for content in ("one", "two"):
        (package / file).write_text(content)
        (package / "notes.txt").write_text(content)
        hashes.append(identity._hash_package("hashed_package"))
    assert len(set(hashes)) == 3
    (package / "notes.txt").unlink()
    assert identity._hash_package("hashed_package") == hashes[-1]
