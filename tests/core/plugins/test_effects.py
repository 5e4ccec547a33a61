"""The effect of a feature, in the config that has only the feature and in others."""

from typing import Any, ClassVar

import attrs
import pytest

from axlearn_core.config import Configurable, Node, map, node, patch
from axlearn_core.plugins.effects import find_effects, find_lost


class Linear(Configurable):
    @node
    class Config(Configurable.Config["Linear"]):
        bias: bool = False


class Quantized(Linear):
    @node
    class Config(Linear.Config):
        bits: int = 8


class Adapted(Configurable):
    @node
    class Config(Configurable.Config["Adapted"]):
        base: Node[Any] = Linear.Config()
        bias: str = "of the adapter"
        rank: int = 4


class Attention(Configurable):
    @node
    class Config(Configurable.Config["Attention"]):
        query: Node[Any] = Linear.Config()
        window: int | Node[Any] | None = None
        cap: float | None = None


class Sinks(Attention):
    pass


class State(Configurable):
    @node
    class Config(Configurable.Config["State"]):
        size: int = 3
        query: Node[Any] = Linear.Config()


class Either(Configurable):
    @node
    class Config(Configurable.Config["Either"]):
        wraps: ClassVar[tuple[str, ...]] = ("children",)

        children: tuple[Node[Any], ...] = ()


class Root(Configurable):
    @node
    class Config(Configurable.Config["Root"]):
        mixer: Node[Any] = Attention.Config()
        tags: tuple[str, ...] = ("a",)
        parts: tuple[Node[Any], ...] = (State.Config(),)
        rules: dict[str, Any] | Any = attrs.field(factory=lambda: {"x": ("one",), "y": 2})
        part: Node[Any] | None = State.Config()


BASE = Root.Config()


def texts(before, after):
    return [str(effect) for effect in find_effects(before, after)]


def edited(target, **values):
    return map(BASE, lambda p: attrs.evolve(p, **values) if isinstance(p, target) else p)


WITH_CAP = patch(BASE, {"mixer.cap": 2.0})
WITH_ADAPTER = patch(BASE, {"mixer.query": Adapted.Config()})
WITH_SINKS = patch(BASE, {"mixer": Sinks.Config()})
WITH_STATES = patch(BASE, {"mixer": Either.Config(children=(State.Config(size=5), Attention.Config()))})
"""Other features, each alone."""


def test_settings_components_and_items():
    assert texts(BASE, BASE) == []
    assert texts(BASE, WITH_CAP) == ["mixer.cap: setting 2.0"]
    assert texts(BASE, patch(BASE, {"part": None})) == ["part: setting None"]
    assert texts(BASE, patch(BASE, {"tags": ("b", "a")})) == ["tags: items ('b',)"]
    assert texts(BASE, patch(BASE, {"tags": ()})) == ["tags: removal ('a',)"]
    assert texts(BASE, patch(BASE, {"rules": {"x": ("one", "two"), "z": 1}})) == [
        "rules.x: items ('two',)",
        "rules.z: setting 1",
        "rules.y: removal None",
    ]
    assert texts(BASE, patch(BASE, {"parts.0.size": 9})) == ["parts.0.size: setting 9"]


def test_values_that_were_carried_over_are_no_effects():
    biased = patch(BASE, {"mixer.query.bias": True})
    assert texts(biased, patch(biased, {"mixer.query": Quantized.Config(bias=True, bits=4)})) == [
        "mixer.query: component Quantized.Config",
        "mixer.query.bits: setting 4",
    ]
    assert texts(biased, patch(biased, {"mixer.query": Adapted.Config(base=biased.mixer.query, rank=8)})) == [
        "mixer.query: component Adapted.Config",
        "mixer.query.rank: setting 8",
    ]


def test_alternatives_have_places():
    states = WITH_STATES
    assert texts(BASE, states) == [
        "mixer: component Either.Config",
        "mixer: alternatives children.0: State.Config",
        "mixer.size: setting 5",
    ]
    assert find_effects(BASE, states)[2].branch == ("mixer:children.0",)
    swapped = patch(states, {"mixer.children": (Attention.Config(), State.Config(size=5))})
    assert [e.kind for e in find_lost(find_effects(BASE, states), swapped)] == ["alternatives"]


def test_a_replaced_alternative_keeps_its_position():
    sinks = patch(WITH_STATES, {"mixer.children.1": Sinks.Config()})
    assert texts(WITH_STATES, sinks) == ["mixer: component Sinks.Config"]
    effects = find_effects(WITH_STATES, sinks)
    assert effects[0].branch == ("mixer:children.1",)
    both = patch(sinks, {"mixer.children.0.query": Quantized.Config(), "mixer.children.1.query.bias": True})
    assert find_lost(effects, both) == ()
    assert len(find_lost(effects, patch(both, {"mixer.children.1": Attention.Config()}))) == 1


ADAPT = find_effects(BASE, WITH_ADAPTER)
CAP = find_effects(BASE, WITH_CAP)
STATES = find_effects(BASE, WITH_STATES)
QUANTIZED = find_effects(BASE, patch(BASE, {"mixer.query": Quantized.Config(bits=4)}))


@pytest.mark.parametrize(
    ("effects", "tree", "lost"),
    [
        (CAP, WITH_CAP, []),
        (CAP, BASE, ["mixer.cap"]),
        (CAP, patch(BASE, {"mixer": Sinks.Config(cap=2.0)}), []),
        (CAP, patch(WITH_STATES, {"mixer.children.1.cap": 2.0}), []),
        (CAP, patch(WITH_STATES, {"mixer.children": (State.Config(), State.Config())}), ["mixer.cap"]),
        (CAP, patch(BASE, {"mixer": Either.Config(children=(WITH_CAP.mixer, BASE.mixer))}), ["mixer.cap"]),
        (ADAPT, patch(WITH_ADAPTER, {"mixer.query.base": Quantized.Config()}), []),
        (ADAPT, BASE, ["mixer.query"]),
        (QUANTIZED, patch(WITH_ADAPTER, {"mixer.query.base": Quantized.Config(bits=4)}), []),
        (QUANTIZED, WITH_ADAPTER, ["mixer.query", "mixer.query.bits"]),
        (QUANTIZED, patch(BASE, {"mixer.query": Quantized.Config(bits=8)}), ["mixer.query.bits"]),
        (find_effects(BASE, WITH_SINKS), WITH_CAP, ["mixer"]),
        (STATES, patch(WITH_STATES, {"mixer.children.1": Sinks.Config()}), []),
        (STATES, patch(BASE, {"mixer": State.Config(size=5)}), ["mixer", "mixer"]),
    ],
)
def test_effects_are_found_again(effects, tree, lost):
    assert [e.path for e in find_lost(effects, tree)] == lost


def test_a_setting_of_a_wrapper_hides_none_of_what_it_wraps():
    effects = find_effects(BASE, patch(BASE, {"mixer.query.bias": True}))
    assert find_lost(effects, patch(WITH_ADAPTER, {"mixer.query.base.bias": True})) == ()
    assert len(find_lost(effects, WITH_ADAPTER)) == 1


def test_components_of_another_feature_need_not_have_the_effect():
    quantized = patch(WITH_STATES, {"mixer.children.1.query": Quantized.Config(bits=4)})
    assert find_lost(QUANTIZED, quantized, STATES) == ()
    assert [e.path for e in find_lost(QUANTIZED, quantized)] == ["mixer.query"]
    assert len(find_lost(QUANTIZED, WITH_STATES, STATES)) == 2


def test_items_and_removals_are_found_in_any_order():
    added = find_effects(BASE, patch(BASE, {"parts": (State.Config(), Linear.Config(bias=True))}))
    assert find_lost(added, patch(BASE, {"parts": (Linear.Config(bias=True), Attention.Config())})) == ()
    assert len(find_lost(added, patch(BASE, {"parts": (Linear.Config(), State.Config())}))) == 1
    removed = find_effects(BASE, patch(BASE, {"rules": {"x": ()}}))
    assert find_lost(removed, patch(BASE, {"rules": {"x": ("two",)}})) == ()
    assert [e.path for e in find_lost(removed, patch(BASE, {"rules": {"x": ("one",), "y": 2}}))] == [
        "rules.x",
        "rules.y",
    ]
