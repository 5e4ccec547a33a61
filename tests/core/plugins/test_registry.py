"""Discovery: names from metadata, one load per request, two claims are an error."""

import sys

import pytest

from axlearn_core.config import configure
from axlearn_core.config.callable_node import configured_class
from axlearn_core.errors import PluginError, RequestError
from axlearn_core.plugins.registry import core_version, registry


def test_listing_imports_nothing(toy):
    names = [entry.name for entry in registry().entries("features")]
    assert {"toy-rope", "toy-moe"} <= set(names)
    assert names == sorted(names)
    assert "toy_features" not in sys.modules
    assert "toy_parts" not in sys.modules


def test_asking_for_one_name_loads_one_object(install):
    install(
        "axlearn-plugins-two",
        modules={"first_part": "VALUE = 1", "second_part": "VALUE = 2"},
        points={"commands": {"first": "first_part:VALUE", "second": "second_part:VALUE"}},
    )
    assert registry().entry("commands", "second").load() == 2
    assert "first_part" not in sys.modules


def test_unknown_name_gives_the_nearest(toy):
    with pytest.raises(RequestError, match=r"unknown feature 'toy-roqe'\n    did you mean: toy-rope,") as caught:
        registry().feature("toy-roqe")
    assert "axlearn features list" in str(caught.value)
    with pytest.raises(RequestError, match=r"unknown experiment 'toi'\n    did you mean: toy"):
        registry().experiment("toi")
    with pytest.raises(RequestError, match=r"unknown component 'toy-atention'\n    did you mean: toy-attention"):
        registry().component("toy-atention")


def test_two_distributions_with_one_name(install):
    for number in (1, 2):
        install(
            f"axlearn-plugins-claim{number}",
            f"{number}.0",
            modules={f"claim{number}": "VALUE = 1"},
            points={"features": {"same": f"claim{number}:VALUE", f"own{number}": f"claim{number}:VALUE"}},
        )
    with pytest.raises(PluginError) as caught:
        registry().feature("same")
    message = str(caught.value)
    assert "2 distributions register the feature 'same'" in message
    assert "axlearn-plugins-claim1 1.0: claim1:VALUE" in message
    assert "axlearn-plugins-claim2 2.0: claim2:VALUE" in message
    assert "AXLEARN_PLUGINS=-axlearn-plugins-claim2" in message
    with pytest.raises(PluginError, match="'same'"):
        registry().entries("features")
    assert registry().entry("features", "own1").load() == 1  # only the name that is registered twice is out of reach


def test_the_fix_that_a_conflict_names_works(install, monkeypatch):
    for number in (1, 2):
        install(
            f"axlearn-plugins-claim{number}",
            modules={f"claim{number}": f"VALUE = {number}"},
            points={"commands": {"same": f"claim{number}:VALUE"}},
        )
    monkeypatch.setenv("AXLEARN_PLUGINS", "-axlearn-plugins-claim2")
    assert registry().entry("commands", "same").load() == 1


def test_one_distribution_found_twice_is_no_conflict(install):
    for folder in ("editable", "wheel"):
        install(
            "axlearn-plugins-once",
            modules={"once_part": "VALUE = 1"},
            points={"commands": {"once": "once_part:VALUE"}},
            folder=folder,
        )
    assert registry().entry("commands", "once").load() == 1


@pytest.mark.parametrize(
    "block", ["-axlearn-plugins-toy", "-Axlearn_Plugins.Toy", "-toy-rope", "-features:toy-rope", " -x, -toy-rope "]
)
def test_blocking(toy, monkeypatch, block):
    monkeypatch.setenv("AXLEARN_PLUGINS", block)
    with pytest.raises(RequestError, match=r"'toy-rope' of axlearn-plugins-toy 0.3 is blocked by AXLEARN_PLUGINS"):
        registry().feature("toy-rope")


def test_blocking_one_group_leaves_the_others(install, monkeypatch):
    points = {group: {"name": "block_part:VALUE"} for group in ("commands", "features")}
    install("axlearn-plugins-block", modules={"block_part": "VALUE = 1"}, points=points)
    monkeypatch.setenv("AXLEARN_PLUGINS", "-features:name")
    assert registry().entry("commands", "name").load() == 1
    with pytest.raises(RequestError, match="blocked"):
        registry().entry("features", "name")


@pytest.mark.parametrize("block", ["toy", "-", "-nogroup:toy", "+toy"])
def test_a_block_that_is_not_understood(monkeypatch, block):
    monkeypatch.setenv("AXLEARN_PLUGINS", block)
    with pytest.raises(RequestError, match="is invalid"):
        registry()


def test_a_plugin_that_raises_on_import(install):
    site = install(
        "axlearn-plugins-bad",
        "2.1",
        modules={"bad_part": "x = 1\nraise ValueError('no good')"},
        points={"features": {"bad": "bad_part:Bad"}},
    )
    with pytest.raises(PluginError) as caught:
        registry().feature("bad")
    message = str(caught.value)
    for part in ("axlearn.features", "'bad'", "bad_part:Bad", "axlearn-plugins-bad 2.1", "ValueError: no good"):
        assert part in message
    assert f"{site / 'bad_part.py'}:2" in message
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("value", "cause"), [("toy_parts:Nope", "AttributeError"), ("no_such_module:X", "ModuleNotFoundError")]
)
def test_an_entry_point_to_nothing(toy, install, value, cause):
    install("axlearn-plugins-gone", points={"features": {"gone": value}})
    with pytest.raises(PluginError, match=cause) as caught:
        registry().feature("gone")
    assert "if its pyproject.toml changed, reinstall axlearn-plugins-gone" in str(caught.value)


@pytest.mark.parametrize("source", ["import no_such_module", "import math\nmath.no_such_name"])
def test_a_module_that_lacks_something_else_need_not_be_installed_again(install, source):
    install("axlearn-plugins-bad", modules={"bad_part": source}, points={"features": {"bad": "bad_part:Bad"}})
    with pytest.raises(PluginError) as caught:
        registry().feature("bad")
    assert "reinstall axlearn-plugins-bad" not in str(caught.value)


def test_a_plugin_for_another_core(install):
    install(
        "axlearn-plugins-future",
        "9.0",
        modules={"future_part": "raise AssertionError('is not imported')"},
        points={"features": {"future": "future_part:X"}},
        requires=("axlearn-core>=99,<100", "numpy"),
    )
    with pytest.raises(PluginError) as caught:
        registry().feature("future")
    message = str(caught.value)
    assert "axlearn-plugins-future 9.0 requires axlearn-core <100,>=99" in message
    assert f"axlearn-core {core_version()} is installed" in message
    assert "fix:" in message


def test_a_range_that_holds_only_for_an_extra_does_not_count(install):
    install(
        "axlearn-plugins-extra",
        modules={"extra_part": "VALUE = 5"},
        points={"commands": {"extra": "extra_part:VALUE"}},
        requires=('axlearn-core>=99; extra == "next"', "Axlearn_Core>=0.1"),
    )
    assert registry().entry("commands", "extra").load() == 5


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("def wrong(): return 5", "returned int, not a config node"),
        ("def wrong(): raise OSError('disk')", "OSError: disk"),
    ],
)
def test_an_experiment_that_fails(install, source, match):
    install(
        "axlearn-plugins-wrong", modules={"wrong_part": source}, points={"experiments": {"wrong": "wrong_part:wrong"}}
    )
    with pytest.raises(PluginError, match=match):
        registry().experiment("wrong")


def test_features_have_to_be_feature_nodes(toy, install):
    install("axlearn-plugins-nofeature", points={"features": {"nofeature": "toy_parts:Rotary"}})
    with pytest.raises(PluginError, match="not a Feature class"):
        registry().feature("nofeature")
    with pytest.raises(PluginError, match="is missing the @node decorator"):
        registry().feature("toy-unmarked")


def test_components_and_their_names(toy):
    import toy_parts

    names = registry()
    assert names.component("toy-attention") is toy_parts.Attention.Config
    assert names.get_name(toy_parts.Rotary.Config) == "toy-rotary"
    assert names.get_name(names.component("toy-scaled")) == "toy-scaled"  # a node that is its own component


def test_a_component_exported_from_elsewhere(toy, install):
    install(
        "axlearn-plugins-export",
        modules={"export_all": "from export_home import Hidden, call", "export_home": EXPORTED},
        points={"components": {"hidden": "export_all:Hidden", "call": "export_all:call"}},
    )
    import export_all  # noqa: F401
    import export_home

    assert registry().get_name(export_home.Hidden.Config) == "hidden"
    result = configure(export_home.call, size=3)
    assert registry().get_name(type(result)) == "call"
    assert registry().component("call") is type(result)


EXPORTED = """
from axlearn_core.config import Configurable
class Hidden(Configurable):
    pass
def call(size: int = 1):
    return size
"""


def test_a_class_that_is_not_registered_says_how_to_register_it(toy):
    import toy_parts

    from axlearn_core.config import Configurable

    class Local(Configurable):
        pass

    names = registry()
    for _ in range(2):  # the answer is kept
        with pytest.raises(RequestError, match=r"Local is not registered as a component[\s\S]*axlearn.components"):
            names.get_name(Local.Config)
    assert names.display_name(Local.Config).endswith("Local")
    assert names.display_name(toy_parts.Decoder.Config) == "toy-decoder"


def test_another_interface_is_another_component(install):
    install(
        "axlearn-plugins-interface",
        modules={"interface_part": "def call(size: int = 1, width: int = 2):\n    return size"},
        points={"components": {"call": "interface_part:call"}},
    )
    import interface_part

    assert registry().get_name(configured_class(interface_part.call)) == "call"
    with pytest.raises(RequestError, match="with interface width=dim is not registered"):
        registry().get_name(configured_class(interface_part.call, ("width=dim",)))


def test_a_broken_component_does_not_hide_another(toy, install):
    import toy_parts

    install(
        "axlearn-plugins-a", modules={"toy_broken": "raise ValueError"}, points={"components": {"a": "toy_broken:A"}}
    )
    assert registry().get_name(toy_parts.Rotary.Config) == "toy-rotary"


@pytest.mark.parametrize("value", ["number_part:VALUE", "number_part"])
def test_an_object_that_is_not_a_component(install, value):
    install("axlearn-plugins-number", modules={"number_part": "VALUE = 5"}, points={"components": {"number": value}})
    with pytest.raises(PluginError, match="is neither a class with a Config"):
        registry().component("number")
