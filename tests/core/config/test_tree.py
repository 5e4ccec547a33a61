"""Edits and questions over trees."""

from collections.abc import Mapping
from typing import Any

import pytest

from axlearn_core.config import (
    ABSENT,
    REQUIRED,
    Configurable,
    Node,
    Scaled,
    diff,
    find,
    find_missing,
    flatten,
    get,
    interface,
    map,
    matches,
    node,
    patch,
    replace_config,
    setting,
    size_of,
    walk,
)  # fmt: skip
from axlearn_core.errors import ConfigError


class NoPosition(Configurable):
    pass


class Rotary(Configurable):
    @node
    class Config(Configurable.Config["Rotary"]):
        theta: float = 1e4


class Attention(Configurable):
    @node
    class Config(Configurable.Config["Attention"]):
        dim: int = interface()
        num_heads: int = setting(default=4, ge=1)
        position: Node[Any] = NoPosition.Config()


class Latent(Configurable):
    @node
    class Config(Configurable.Config["Latent"]):
        num_heads: int = 4
        rank: int = 16
        position: Node[Any] = NoPosition.Config()


class SubAttention(Attention):
    pass


class Gated(Attention):
    @node
    class Config(Attention.Config):
        gate: Node[Any] = Rotary.Config()
        cap: float = 2.0


class Other(Configurable):
    @node
    class Config(Configurable.Config["Other"]):
        rank: int = 1


class Model(Configurable):
    @node
    class Config(Configurable.Config["Model"]):
        first: Node[Any] = Attention.Config()
        layers: tuple[Node[Any], ...] = (Attention.Config(num_heads=2), Rotary.Config())
        table: Mapping[str, Node[Any]] = {}
        rates: Mapping[str, float] = {}
        sizes: tuple[int, ...] = (1, 2)
        width: int = REQUIRED


TREE = Model.Config()


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("**", "", True),
        ("**", "a.b", True),
        ("**.b", "b", True),
        ("a.**.d", "a.d", True),
        ("a.**.d", "a.b.c.d", True),
        ("a.**.d", "a.b.c.e", False),
        ("lay*.x", "layer.x", True),
        ("", "", True),
        ("", "a", False),
        ("a.**.**.b", "a.b", True),
    ],
)
def test_patterns(pattern, path, fits):
    assert matches(pattern, path) is fits


def test_get_and_find():
    assert get(TREE, "layers.0.num_heads") == 2
    assert get(TREE, "") is TREE
    assert list(find(TREE, "**.num_heads")) == ["first.num_heads", "layers.0.num_heads"]
    assert list(find(TREE, Attention)) == ["first", "layers.0"]
    assert list(find(TREE, SubAttention)) == []
    assert next(p for p, _ in walk(TREE)) == ""
    with pytest.raises(
        ConfigError, match=r"no 'num_head' in layers.0 \(Attention.Config\)[\s\S]*did you mean: layers.0.num_heads"
    ):
        get(TREE, "layers.0.num_head")
    with pytest.raises(ConfigError, match="which is the value 4"):
        get(TREE, "first.num_heads.more")


def test_patch_leaves_the_rest_the_same_object():
    new = patch(TREE, {"first.num_heads": 8, "layers.1.theta": 5.0, "width": 3})
    assert (get(new, "first.num_heads"), get(new, "layers.1.theta"), new.width) == (8, 5.0, 3)
    assert get(new, "layers.0") is get(TREE, "layers.0")
    assert Model.Config() == TREE
    assert patch(TREE, {}) is TREE


def test_patch_patterns_and_order():
    new = patch(TREE, {"**.num_heads": 6, "first": Attention.Config(num_heads=1)})
    assert list(find(new, "**.num_heads").values()) == [6, 6]  # outer paths first, then what is inside


def test_patch_adds_keys_to_mappings_only():
    new = patch(TREE, {"table.new": Rotary.Config(), "rates.a": 1})
    assert new.rates == {"a": 1.0}
    assert get(new, "table.new.theta") == 1e4
    with pytest.raises(ConfigError, match="no 'new' in the root"):
        patch(TREE, {"new": 1})
    with pytest.raises(ConfigError, match="no '7' in sizes"):
        patch(TREE, {"sizes.7": 1})


def test_patch_reports_all_problems_with_whole_paths():
    with pytest.raises(ConfigError) as caught:
        patch(
            TREE,
            {
                "first.num_heads": "x",
                "layers.0.num_heads": 0,
                "**.nope": 1,
                "rates.a": "x",
                "first.dim": 3,
                "sizes.0": "a",
            },
        )
    results = {p.path: p for p in caught.value.problems}
    assert set(results) == {"first.num_heads", "layers.0.num_heads", "**.nope", "rates.a", "first.dim", "sizes.0"}
    assert results["first.dim"].message == "is passed by the parent and cannot be set"
    assert "matches nothing" in results["**.nope"].message


def test_map_goes_bottom_up_and_does_not_revisit():
    records = []

    def note(value):
        records.append(type(value).__qualname__)
        return Attention.Config(num_heads=9, position=value) if isinstance(value, Rotary.Config) else value

    new = map(TREE, note)
    assert records[-1] == "Model.Config"
    assert get(new, "layers.1.position.theta") == 1e4
    assert map(TREE, lambda v: v) is TREE


def test_replace_carries_over_what_both_have():
    tree = patch(TREE, {"first.num_heads": 8, "first.position": Rotary.Config(theta=3.0)})
    new = replace_config(tree, Attention, Latent.Config())
    assert get(new, "first") == Latent.Config(num_heads=8, position=Rotary.Config(theta=3.0))
    assert get(new, "layers.0.num_heads") == 2
    assert replace_config(patch(tree, {"layers": ()}), Attention, Latent.Config(num_heads=5)).first.num_heads == 5


def test_replace_refuses_to_lose_what_was_set():
    with pytest.raises(ConfigError, match=r"layers.0.num_heads: would be lost[\s\S]*drop="):
        replace_config(TREE, Attention, Other.Config())
    assert get(replace_config(TREE, Attention, Other.Config(), drop=("num_heads",)), "layers.0") == Other.Config()


def test_replace_refuses_to_lose_the_components_of_a_subclass():
    tree = patch(TREE, {"first": Gated.Config()})
    with pytest.raises(ConfigError, match=r"first.gate: would be lost: Latent.Config has no such field") as raised:
        replace_config(tree, Attention, Latent.Config())
    assert [p.path for p in raised.value.problems] == ["first.gate"]
    assert get(replace_config(tree, Attention, Latent.Config(), drop=("gate",)), "first") == Latent.Config()
    assert get(replace_config(tree, Gated, Latent.Config()), "first") == Latent.Config()


def test_replace_twice_is_replace_once():
    once = replace_config(TREE, Attention, SubAttention.Config(num_heads=7))
    assert replace_config(once, Attention, SubAttention.Config(num_heads=7)) == once
    assert len(find(once, SubAttention)) == 2
    wrapped = Attention.Config(position=Attention.Config(num_heads=3))
    twice = replace_config(replace_config(TREE, Rotary, wrapped), Rotary, wrapped) if find(TREE, Rotary) else None
    assert twice is None or len(find(twice, Rotary)) == 0


def test_replace_nothing_is_an_error():
    with pytest.raises(ConfigError, match=r"the tree has no Latent.Config[\s\S]*one of Attention.Config"):
        replace_config(TREE, Latent, Other.Config())
    with pytest.raises(TypeError, match="has no Config"):
        replace_config(TREE, int, Other.Config())


def test_missing_lists_whole_paths_and_no_interface_fields():
    assert [p.path for p in find_missing(patch(TREE, {"table.a": Model.Config()}))] == ["width", "table.a.width"]


def test_flatten():
    flat = flatten(patch(TREE, {"rates.a": 1.0}), lambda cls: cls.__qualname__)
    assert flat["type"] == "Model.Config"
    assert flat["layers.0.position.type"] == "NoPosition.Config"
    assert flat["rates.a"] == 1.0
    assert flat["table"] == {}
    assert flat["sizes"] == (1, 2)
    assert "first.dim" not in flat
    assert flat["width"] is REQUIRED


def test_diff():
    new = patch(TREE, {"first": Rotary.Config(), "sizes": (3,), "width": 1})
    changes = {c.path: (c.kind, c.old, c.new) for c in diff(TREE, new, lambda cls: cls.__qualname__)}
    assert changes == {
        "first.type": ("changed", "Attention.Config", "Rotary.Config"),
        "first.theta": ("added", ABSENT, 1e4),
        "first.num_heads": ("removed", 4, ABSENT),
        "first.position.type": ("removed", "NoPosition.Config", ABSENT),
        "sizes": ("changed", (1, 2), (3,)),
        "width": ("changed", REQUIRED, 1),
    }
    assert diff(TREE, Model.Config()) == ()


def test_sizes():
    assert size_of(12, base=384) == 12
    assert size_of(Scaled(factor=8 / 3), base=384) == 1024
    assert size_of(Scaled(factor=8 / 3, multiple_of=256), base=4096) == 11008
    assert size_of(Scaled(factor=0.5, multiple_of=8), base=17) == 16
