"""Kinds of changes: marks apply to everything below them, and classes that compute alike may replace each other."""

from collections.abc import Mapping
from typing import Any

import pytest

from axlearn_core.config import REQUIRED, Configurable, Node, diff, node, setting
from axlearn_core.config.kinds import change_kinds, get_kind, mathematics, microbatches
from axlearn_core.errors import ConfigError


class Stack(Configurable):
    @node
    class Config(Configurable.Config["Stack"]):
        mode: str = setting(default="scan", kind="execution")
        depth: int = 2


class Staged(Stack):
    @node
    class Config(Stack.Config):
        computes_like = Stack.Config

        parts: int = setting(default=REQUIRED, kind="microbatches")
        order: str = setting(default="gpipe", kind="execution")
        rounding: str | None = None


class Doubled(Staged):
    """Its config derives from one that computes like `Stack`, and does not say so of itself."""


class Saver(Configurable):
    @node
    class Config(Configurable.Config["Saver"]):
        every: int = 10
        metric: str = setting(default="loss", kind="mathematics")


class Root(Configurable):
    @node
    class Config(Configurable.Config["Root"]):
        stack: Node[Any] = Stack.Config()
        saver: Node[Any] = setting(default=Saver.Config(), kind="execution")
        shape: Mapping[str, int] = setting(default={}, kind="execution")
        tables: Mapping[str, Mapping[str, int]] = {}
        savers: tuple[Node[Any], ...] = setting(default=(), kind="execution")
        steps: int = setting(default=5, kind="duration", ge=1)
        width: int = 3


def kinds(old, new):
    return {change.path: kind for change, kind in change_kinds(diff(old, new), old, new)}


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("", "mathematics"),
        ("type", "mathematics"),
        ("width", "mathematics"),
        ("stack", "mathematics"),
        ("stack.type", "mathematics"),
        ("stack.mode", "execution"),
        ("stack.depth", "mathematics"),
        ("saver", "execution"),
        ("saver.type", "execution"),
        ("saver.every", "execution"),
        ("saver.metric", "mathematics"),  # the innermost mark holds
        ("shape.fsdp", "execution"),
        ("savers.0.every", "execution"),
        ("tables.a.b", "mathematics"),
        ("steps", "duration"),
    ],
)
def test_the_kind_of_a_path(path, kind):
    root = Root.Config(shape={"fsdp": 8}, tables={"a": {"b": 1}}, savers=(Saver.Config(),))
    assert get_kind(root, path) == kind


def test_a_path_that_is_not_there():
    with pytest.raises(ConfigError, match="no 'sharp' in the root"):
        get_kind(Root.Config(), "sharp")


def test_a_bound_and_a_kind_go_together():
    with pytest.raises(ConfigError, match="out of range"):
        Root.Config(steps=0)


def test_a_class_that_computes_like_another_is_execution():
    old, new = Root.Config(), Root.Config(stack=Staged.Config(parts=2))
    expected = {
        "stack.type": "execution",
        "stack.parts": "microbatches",
        "stack.order": "execution",
        "stack.rounding": "execution",  # at its default it changes nothing
    }
    assert kinds(old, new) == expected
    assert kinds(new, old) == expected
    assert mathematics(old) == mathematics(new)
    assert microbatches(old) == {}
    assert microbatches(new) == {"stack.parts": 2}


def test_what_such_a_class_adds_is_mathematics_once_it_is_set():
    plain, staged = Root.Config(), Root.Config(stack=Staged.Config(parts=2))
    rounded = Root.Config(stack=Staged.Config(parts=2, rounding="bfloat16"))
    assert kinds(plain, rounded)["stack.rounding"] == "mathematics"
    assert kinds(staged, rounded) == {"stack.rounding": "mathematics"}
    assert kinds(rounded, staged) == {"stack.rounding": "mathematics"}
    assert mathematics(rounded) != mathematics(staged)


def test_a_subclass_has_to_say_itself_what_it_computes_like():
    assert kinds(Root.Config(), Root.Config(stack=Doubled.Config(parts=2)))["stack.type"] == "mathematics"


def test_another_class_of_another_kind_is_mathematics():
    assert kinds(Root.Config(), Root.Config(stack=Saver.Config()))["stack.type"] == "mathematics"
    assert kinds(Root.Config(), Root.Config(saver=Stack.Config()))["saver.type"] == "execution"


def test_computes_like_is_no_name_for_a_field():
    with pytest.raises(TypeError, match="the field name 'computes_like' is reserved"):

        @node
        class Bad(Node[None]):
            computes_like: int = 1  # pyright: ignore[reportIncompatibleVariableOverride]
