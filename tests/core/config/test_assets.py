"""Files that belong to a run: their names in the config, and how they are found again."""

import logging

import pytest

from axlearn_core.config import Configurable, check, node, setting
from axlearn_core.config import assets as module
from axlearn_core.config.assets import LocalRun, assets, attach, make_portable, match_asset_paths
from axlearn_core.errors import ConfigError


class Vocabulary(Configurable):
    @node
    class Config(Configurable.Config["Vocabulary"]):
        path: str | None = setting(default=None, asset=True, siblings=("merges.txt",))
        size: int = 3


class Pair(Configurable):
    @node
    class Config(Configurable.Config["Pair"]):
        one: str | None = setting(default=None, asset=True)
        other: str | None = setting(default=None, asset=True)


class Root(Configurable):
    @node
    class Config(Configurable.Config["Root"]):
        vocabulary: Vocabulary.Config = Vocabulary.Config()
        pair: Pair.Config = Pair.Config()
        more: dict[str, Vocabulary.Config] = {}  # noqa: RUF012
        plain: str | None = None


@pytest.fixture(autouse=True)
def no_notes(monkeypatch):
    monkeypatch.setattr(module, "_notes", set())


def tree(path="/data/v.json", **fields):
    return Root.Config(vocabulary=Vocabulary.Config(path=path), **fields)


def run_with(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return LocalRun("config.yaml", (folder,))


def test_a_run_names_its_copies_by_the_node_that_uses_them():
    config, copies = make_portable(
        tree(
            pair=Pair.Config(one="a/x.bin", other="b/x.bin"),
            more={"a/b": Vocabulary.Config(path="w.json"), ".c": Vocabulary.Config(path="/data/v.json")},
            plain="/data/v.json",
        )
    )
    assert config.vocabulary.path == "run:files/vocabulary/v.json"
    assert (config.pair.one, config.pair.other) == ("run:files/pair.one/x.bin", "run:files/pair.other/x.bin")
    assert config.more["a/b"].path == "run:files/more.a%2Fb/w.json"
    assert config.more[".c"].path == config.vocabulary.path  # one copy of one file
    assert config.plain == "/data/v.json"
    assert {name: asset.value for name, asset in copies.items()} == {
        "files/vocabulary/v.json": "/data/v.json",
        "files/pair.one/x.bin": "a/x.bin",
        "files/pair.other/x.bin": "b/x.bin",
        "files/more.a%2Fb/w.json": "w.json",
    }
    assert make_portable(config) == (config, {})
    assert Vocabulary.Config(path="v.json") == make_portable(Vocabulary.Config(path="v.json"))[0].__class__(
        path="v.json"
    )


def test_a_config_without_assets_is_the_same_object():
    config = Root.Config(plain="run:files/x")
    assert make_portable(config)[0] is config
    assert attach(config, LocalRun("c", ()))[0] is config
    assert assets(config) == []


def test_a_copy_is_found_wherever_the_run_is(tmp_path, monkeypatch):
    stored, _ = make_portable(tree())
    run_with(tmp_path / "one", "files/vocabulary/v.json")
    (tmp_path / "one").rename(tmp_path / "two")
    monkeypatch.chdir(tmp_path)
    attached, lost = attach(
        stored, LocalRun.from_config_file(tmp_path.joinpath("two/config.yaml").relative_to(tmp_path))
    )
    assert (attached.vocabulary.path, lost) == (str(tmp_path / "two/files/vocabulary/v.json"), [])
    assert make_portable(attached)[0] == stored


def test_the_config_in_a_checkpoint_finds_the_files_of_its_run(tmp_path):
    run_with(tmp_path, "files/vocabulary/v.json", "checkpoints/5/manifest.json", "checkpoints/5/config.yaml")
    attached, lost = attach(make_portable(tree())[0], LocalRun.from_config_file(tmp_path / "checkpoints/5/config.yaml"))
    assert (attached.vocabulary.path, lost) == (str(tmp_path / "files/vocabulary/v.json"), [])


@pytest.mark.parametrize("name", ["files/vocabulary/v.json", "../v.json", "/etc/hosts", "files/../../v.json"])
def test_a_file_that_the_run_lacks_is_one_clear_error(name, tmp_path):
    (tmp_path / "v.json").touch()
    config, lost = attach(tree(f"run:{name}"), run_with(tmp_path / "run", "config.yaml"))
    assert [asset.path for asset in lost] == ["vocabulary.path"]
    with pytest.raises(
        ConfigError, match=r"vocabulary.path[\s\S]*does not have it[\s\S]*got: [\s\S]*expected[\s\S]*fix"
    ) as e:
        check(config)
    assert len(e.value.problems) == 1


def test_earlier_runs(tmp_path, caplog):
    """A path inside the run is silent, one that is gone is taken from the run, and one elsewhere is used with a note."""
    run = run_with(tmp_path / "run", "v.json", "huggingface/v.json", "huggingface/merges.txt")
    copy = str(tmp_path / "run/huggingface/v.json")  # beside it lies what belongs to it
    with caplog.at_level(logging.WARNING):
        assert attach(tree(str(tmp_path / "run/v.json")), run)[0].vocabulary.path == copy
        assert not caplog.messages
        assert attach(tree("/gone/v.json"), run)[0].vocabulary.path == copy
        assert "/gone/v.json does not exist; using the run's copy of v.json" in caplog.text
        assert attach(tree("/gone/w.json"), run)[0].vocabulary.path == "/gone/w.json"
        assert len(caplog.messages) == 1
        (tmp_path / "v.json").touch()
        for _ in range(2):
            outside = attach(tree(str(tmp_path / "v.json")), run)[0]
        assert outside.vocabulary.path == str(tmp_path / "v.json")
        assert attach(tree("s3://bucket/v.json"), run)[0].vocabulary.path == "s3://bucket/v.json"
    assert len(caplog.messages) == 3  # each once
    assert f"outside the run: {tmp_path / 'v.json'}" in caplog.text
    assert "copy the file to files/vocabulary/v.json in the run" in caplog.text


def test_siblings_need_an_asset():
    with pytest.raises(TypeError, match="requires asset=True"):
        setting(default=None, siblings=("a",))


def test_copies_of_an_asset_are_no_difference(tmp_path):
    for folder, text in (("a", "same"), ("b", "same"), ("c", "another")):
        run_with(tmp_path / folder, "merges.txt")
        (tmp_path / folder / "v.json").write_text(text)
    a, b, c = (str(tmp_path / folder / "v.json") for folder in "abc")
    assert match_asset_paths(tree(b), tree(a)) == tree(a)
    assert match_asset_paths(tree(c), tree(a)) == tree(c)
    assert match_asset_paths(tree("gone.json"), tree(a)) == tree("gone.json")
    assert match_asset_paths(tree(b), Root.Config()) == tree(b)
    (tmp_path / "b" / "merges.txt").write_text("other merges")  # it belongs to the asset
    assert match_asset_paths(tree(b), tree(a)) == tree(b)
