"""Paths and edits reach into the nodes that a wrapper or an alternate stands for."""

from typing import Any, ClassVar, Protocol

import pytest

from axlearn_core.config import REQUIRED, Configurable, Node, find, get, node, patch, setting
from axlearn_core.config.kinds import get_kind
from axlearn_core.config.tree import expand, fill_slots, leave_out_wrappers, locate, slot_path
from axlearn_core.config.wrappers import edit_innermost, slot_nodes, wrapped_node, wrapped_nodes
from axlearn_core.errors import ConfigError, Problem


class Mixer(Protocol):
    def mix(self): ...


class Encoding(Protocol):
    def encode(self): ...


class Rotary(Configurable):
    @node
    class Config(Configurable.Config["Rotary"]):
        theta: float = 1e4


class Attention(Configurable):
    @node
    class Config(Configurable.Config["Attention"]):
        num_heads: int = setting(default=4, ge=1)
        kernel: str | None = setting(default=None, kind="execution")
        position: Node[Encoding] | None = None


class State(Configurable):
    @node
    class Config(Configurable.Config["State"]):
        size: int = 3


class Gate(Configurable):
    """Its slot has the usual name."""

    @node
    class Config(Configurable.Config["Gate"]):
        inner: Node[Mixer] = REQUIRED
        scale: float = 1.0
        kernel: str | None = None


class Loop(Configurable):
    """Its slot has another name."""

    @node
    class Config(Configurable.Config["Loop"]):
        wraps: ClassVar[tuple[str, ...]] = ("loop",)

        loop: Node[Mixer] = REQUIRED


class Either(Configurable):
    @node
    class Config(Configurable.Config["Either"]):
        wraps: ClassVar[tuple[str, ...]] = ("first", "children")

        first: tuple[Node[Any], ...] = ()
        children: tuple[Node[Any], ...] = ()


class Model(Configurable):
    @node
    class Config(Configurable.Config["Model"]):
        mixer: Node[Mixer] = Attention.Config()
        other: Node[Mixer] | None = None


ATTENTION = Attention.Config(position=Rotary.Config())
WRAPPED = Model.Config(mixer=Gate.Config(inner=Loop.Config(loop=ATTENTION)))
VARIED = Model.Config(mixer=Either.Config(children=(State.Config(), Gate.Config(inner=ATTENTION))))


def test_nodes_that_stand_for_others():
    assert wrapped_node(WRAPPED.mixer) == ("inner", WRAPPED.mixer.inner)
    assert wrapped_node(ATTENTION) is None
    assert wrapped_node(4) is None
    assert wrapped_node(VARIED.mixer) is None
    assert list(wrapped_nodes(VARIED.mixer)) == ["children.0", "children.1"]
    assert wrapped_nodes("text") == {}
    assert [p for p, _ in slot_nodes(VARIED.mixer, "m")] == ["m", "m.children.0", "m.children.1", "m.children.1.inner"]


def test_a_plain_path_reaches_into_a_wrapper():
    assert get(WRAPPED, "mixer.num_heads") == 4
    assert get(WRAPPED, "mixer.position.theta") == 1e4
    assert locate(WRAPPED, "mixer.position") == "mixer.inner.loop.position"
    new = patch(WRAPPED, {"mixer.num_heads": 8, "mixer.position.theta": 5.0})
    assert new.mixer.inner.loop == Attention.Config(num_heads=8, position=Rotary.Config(theta=5.0))
    assert patch(WRAPPED, {"mixer.inner.loop.num_heads": 8}).mixer.inner.loop.num_heads == 8


def test_the_fields_of_a_wrapper_come_first():
    assert get(patch(WRAPPED, {"mixer.kernel": "fast"}), "mixer.inner.loop.kernel") is None
    assert get(WRAPPED, "mixer") is WRAPPED.mixer
    assert patch(WRAPPED, {"mixer": ATTENTION}).mixer is ATTENTION


def test_patterns_match_with_and_without_wrappers():
    assert expand(WRAPPED, "mixer.*") == [
        "mixer.inner",
        "mixer.inner.loop.num_heads",
        "mixer.inner.loop.position",
        "mixer.scale",
        "mixer.kernel",
    ]
    assert [*find(WRAPPED, "**.mixer.num_heads")] == ["mixer.inner.loop.num_heads"]
    assert [*find(WRAPPED, "**.kernel")] == ["mixer.inner.loop.kernel", "mixer.kernel"]
    assert [*find(WRAPPED, "mixer.kernel")] == ["mixer.kernel"]  # the other one is hidden by the wrapper
    assert patch(WRAPPED, {"**.mixer.position.theta": 2.0}).mixer.inner.loop.position.theta == 2.0


def test_a_path_that_does_not_exist_names_those_inside():
    with pytest.raises(
        ConfigError, match=r"mixer.kernel, mixer.inner.loop[\s\S]*did you mean: mixer.inner.loop.num_heads"
    ):
        get(WRAPPED, "mixer.num_head")
    with pytest.raises(ConfigError) as raised:
        patch(VARIED, {"mixer.position.theta": 5.0})
    (problem,) = raised.value.problems
    assert problem.path == "mixer.position.theta"
    assert (
        problem.fix == "Either.Config has several components; name one of them: mixer.children.1.inner.position.theta"
    )
    with pytest.raises(ConfigError, match="out of range"):
        patch(WRAPPED, {"mixer.num_heads": 0})


def test_slots_leave_out_what_is_around_a_node():
    assert slot_path(VARIED, "mixer.children.1.inner.position.theta") == "mixer.position.theta"
    assert slot_path(WRAPPED, "mixer.inner.loop.num_heads") == "mixer.num_heads"
    assert slot_path(WRAPPED, "mixer.inner") == "mixer"
    assert slot_path(WRAPPED, "") == ""
    assert leave_out_wrappers(WRAPPED, "mixer.inner.loop.num_heads") == "mixer.num_heads"
    assert leave_out_wrappers(VARIED, "mixer.children.1.inner.position") == "mixer.children.1.position"
    assert leave_out_wrappers(WRAPPED, "mixer.nope.inner") == "mixer.nope.inner"


def test_edits_of_the_innermost_nodes():
    def grow(value):
        return patch(value, {"num_heads": 16}) if isinstance(value, Attention.Config) else value

    assert edit_innermost(WRAPPED.mixer, grow).inner.loop.num_heads == 16
    assert edit_innermost(VARIED.mixer, grow).children[1].inner.num_heads == 16
    assert edit_innermost(VARIED.mixer, grow).children[0] == State.Config()
    assert edit_innermost(None, lambda old: old or ATTENTION) is ATTENTION


def test_filling_a_slot_keeps_its_wrappers():
    no_match = Problem(path="", message="no slot")
    paths = []

    def fill(path, old):
        paths.append(path)
        return State.Config() if isinstance(old, Attention.Config) else None

    new = fill_slots(WRAPPED, Mixer, fill, no_match=no_match)
    assert new == Model.Config(mixer=Gate.Config(inner=Loop.Config(loop=State.Config())))
    assert paths == ["mixer.inner.loop", "other"]
    nested = patch(WRAPPED, {"mixer.position": Rotary.Config(theta=3.0)})
    new = fill_slots(nested, Encoding, lambda _, old: Rotary.Config(theta=old.theta + 1), no_match=no_match)
    assert get(new, "mixer.position.theta") == 4.0


def test_the_kind_of_a_wrapped_field():
    assert get_kind(WRAPPED, "mixer.position.theta") == "mathematics"
    assert get_kind(WRAPPED, "mixer.inner.loop.kernel") == "execution"
    assert get_kind(WRAPPED, "mixer.inner.type") == "mathematics"
    with pytest.raises(ConfigError, match="no 'nope'"):
        get_kind(WRAPPED, "mixer.nope")


def test_wraps_is_not_a_field():
    with pytest.raises(TypeError, match="'wraps' is reserved"):

        @node
        class Bad(Node[Any]):
            wraps: str = "inner"
