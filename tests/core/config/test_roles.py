"""Nodes are found and edited by their roles and by what their slots are for, whatever their fields are called."""

from typing import Any, Protocol

import pytest

from axlearn_core.config import Configurable, Node, configure, find, node
from axlearn_core.config.roles import Role, states_role
from axlearn_core.config.slots import list_slots
from axlearn_core.config.tree import SKIP, edit_nodes, fill_slots, find_slots, set_fields
from axlearn_core.errors import ConfigError, Problem

NO_MATCH = Problem(path="model", message="nothing to set")


class Encoding(Protocol):
    def __call__(self, x: int) -> int: ...


class Other(Protocol):
    def __call__(self, x: int) -> int: ...


class WindowRole(Role, fields=("window",)):
    __slots__ = ()


class Part(Configurable):
    @node
    class Config(Configurable.Config["Part"]):
        size: int = 1

    def __call__(self, x: int) -> int:
        return x


class Attention(Configurable):
    @node
    class Config(Configurable.Config["Attention"], WindowRole):
        num_heads: int = 4
        window: int | None = None
        angle: Node[Encoding] | None = None
        beside: Node[Other] | None = None


class LookAlike(Configurable):
    """Has the fields of an attention, but not its role."""

    @node
    class Config(Configurable.Config["LookAlike"]):
        num_heads: int = 4
        window: int | None = None
        position: Node[Any] | None = None


class Derived(Attention):
    pass


class Model(Configurable):
    @node
    class Config(Configurable.Config["Model"]):
        layers: tuple[Node[Any], ...] = (Attention.Config(), LookAlike.Config(), Derived.Config())
        encoding: Node[Encoding] = Part.Config(size=7)


CFG = Model.Config()


def test_a_role_finds_its_nodes_and_their_subclasses():
    assert [*find(CFG, WindowRole)] == ["layers.0", "layers.2"]


def test_a_class_states_a_role_for_itself_alone():
    class Restated(Attention):
        @node
        class Config(Attention.Config, WindowRole):
            pass

    stated = [states_role(part, WindowRole) for part in (Attention.Config(), Derived.Config(), Restated.Config(), None)]
    assert stated == [True, False, True, False]


def test_a_node_with_a_role_is_a_value_as_any_other():
    a, b = Attention.Config(window=3), Attention.Config(window=3)
    assert (a, hash(a)) == (b, hash(b))
    assert not hasattr(a, "__dict__")


def test_setting_fields_leaves_nodes_without_the_role_alone():
    result = set_fields(CFG, WindowRole, {"window": 5}, no_match=NO_MATCH)
    assert [layer.window for layer in result.layers] == [5, None, 5]
    assert result.encoding is CFG.encoding
    assert set_fields(result, WindowRole, {"window": 5}, no_match=NO_MATCH) is result


def test_fields_can_be_set_by_class():
    result = set_fields(CFG, Derived, {"num_heads": 8}, no_match=NO_MATCH)
    assert [layer.num_heads for layer in result.layers] == [4, 4, 8]


def test_no_match_is_the_given_problem():
    with pytest.raises(ConfigError, match="nothing to set"):
        set_fields(LookAlike.Config(), WindowRole, {"window": 5}, no_match=NO_MATCH)


def test_a_role_whose_field_is_missing_is_an_error():
    with pytest.raises(TypeError, match="Config lacks the field 'window' of the role WindowRole: declare the field"):

        @node
        class Config(Node[Any], WindowRole):
            windows: int = 1


def test_a_role_may_extend_another():
    class SinkRole(WindowRole, fields=("sinks",)):
        __slots__ = ()

    with pytest.raises(TypeError, match="'window' of the role WindowRole"):

        @node
        class Config(Node[Any], SinkRole):
            sinks: int = 1

    with pytest.raises(TypeError, match="'sinks' of the role SinkRole"):

        @node
        class Other(Node[Any], SinkRole):
            window: int = 1


def test_the_type_of_a_field_is_that_of_the_node():
    with pytest.raises(ConfigError, match="wrong type"):
        Attention.Config(window="wide")


def test_slots_are_found_by_what_they_are_for():
    assert list_slots(Attention.Config, Encoding) == ("angle",)
    assert list_slots(LookAlike.Config, Encoding) == ()
    assert find_slots(CFG, Encoding) == {
        "encoding": CFG.encoding,
        "layers.0.angle": None,
        "layers.2.angle": None,
    }


def test_every_slot_is_filled():
    result = fill_slots(CFG, Encoding, lambda path, old: old or Part.Config(size=2), no_match=NO_MATCH)
    assert [getattr(layer, "angle", "no slot") for layer in result.layers] == [
        Part.Config(size=2),
        "no slot",
        Part.Config(size=2),
    ]
    assert result.encoding is CFG.encoding
    assert fill_slots(result, Encoding, lambda _, old: old, no_match=NO_MATCH) is result


def test_a_slot_within_a_filled_one_is_left():
    nested = Model.Config(encoding=Model.Config(layers=()), layers=())
    paths = []
    fill_slots(nested, Encoding, lambda path, old: paths.append(path) or old, no_match=NO_MATCH)
    assert paths == ["encoding"]
    paths.clear()
    with pytest.raises(ConfigError, match="nothing to set"):
        fill_slots(nested, Encoding, lambda path, old: paths.append(path), no_match=NO_MATCH)
    assert paths == ["encoding", "encoding.encoding"]


def refuse(path, part):
    if isinstance(part, (WindowRole, Part.Config)):
        raise ConfigError([Problem(path="size", message="refused"), Problem(path="", message="refused too")])


def test_all_problems_of_edits_are_raised_with_their_paths():
    expected = ["layers.0.size", "layers.0", "layers.2.size", "layers.2", "encoding.size", "encoding"]
    for edit in (lambda: edit_nodes(CFG, refuse, no_match=NO_MATCH), lambda: edit_nodes(CFG, refuse, no_match=None)):
        with pytest.raises(ConfigError) as caught:
            edit()
        assert [problem.path for problem in caught.value.problems] == expected
    with pytest.raises(ConfigError) as caught:
        fill_slots(CFG, Encoding, lambda path, old: refuse(path, old or Part.Config()), no_match=NO_MATCH)
    assert [problem.path for problem in caught.value.problems][:2] == ["layers.0.angle.size", "layers.0.angle"]


def test_outermost_edits_do_not_look_below_what_they_replaced():
    tree = Model.Config(layers=(Model.Config(layers=()),))
    paths = []

    def note(path, part):
        paths.append(path)
        return part if path == "layers.0" else None

    assert edit_nodes(tree, note, no_match=NO_MATCH, outermost=True) is tree
    assert paths == ["", "layers.0", "encoding"]
    paths.clear()
    edit_nodes(tree, note, no_match=NO_MATCH)
    assert paths == ["layers.0.encoding", "layers.0", "encoding", ""]


def test_what_is_skipped_counts_as_no_edit():
    paths = []
    with pytest.raises(ConfigError, match="nothing to set"):
        edit_nodes(CFG, lambda path, part: paths.append(path) or SKIP, no_match=NO_MATCH, outermost=True)
    assert paths == [""]
    assert edit_nodes(CFG, lambda path, part: None, no_match=None) is CFG


def foreign_layer(window: int = 1, position: int = 2) -> int:
    return window + position


def test_foreign_functions_have_neither_roles_nor_slots():
    foreign = configure(foreign_layer, window=2)
    assert find(foreign, WindowRole) == {}
    assert find_slots(foreign, Encoding) == {}
