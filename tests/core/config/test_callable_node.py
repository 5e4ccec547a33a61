"""`configure`: any callable as a node, checked against its signature."""

import pickle
from typing import Any

import pytest

from axlearn_core.config import REQUIRED, Scaled, check, configure, flatten, patch
from axlearn_core.config.callable_node import configured_class
from axlearn_core.errors import ConfigError, RequestError


def rate(peak: float, steps: int = 10, *args: Any, **kwargs: Any):
    """A schedule."""
    return ("rate", peak, steps)


def optimizer(learning_rate: Any, b1: float = 0.9, nesterov: bool = False, mask: Any = None):
    return (learning_rate, b1, nesterov, mask)


def layer(num_features: int, dim: int, *, rngs: Any, epsilon: float = 1e-6):
    return (num_features, dim, rngs, epsilon)


class Widget:
    def __init__(self, size: int, name: str = "w"):
        self.size, self.name = size, name


def has_type(type: str = ""):
    return type


def test_it_calls_with_the_settings():
    assert configure(optimizer, learning_rate=0.1, nesterov=True).build() == (0.1, 0.9, True, None)
    instance = configure(Widget, size=3).build()
    assert (type(instance), instance.size, instance.name) == (Widget, 3, "w")


def test_nodes_among_the_settings_are_built():
    node = configure(optimizer, learning_rate=configure(rate, peak=1.0))
    assert node.build(max_steps=5)[0] == ("rate", 1.0, 10)
    assert configure(Widget, size=Scaled(factor=2.0)).build(base=4).size == 8


def test_what_parents_offer():
    assert configure(layer, "num_features=width").build(width=8, dim=4, rngs=1, other=2) == (8, 4, 1, 1e-6)
    assert configure(layer, num_features=3).build(dim=4, rngs=1) == (3, 4, 1, 1e-6)
    assert configure(optimizer, learning_rate=1.0).build(mask="offered")[3] == "offered"
    assert configure(optimizer, learning_rate=1.0, mask="mine").build(mask="offered")[3] == "mine"


def test_it_is_checked_against_the_signature():
    with pytest.raises(RequestError, match=r"optimizer has no parameter 'b_1'; did you mean: b1\?"):
        configure(optimizer, b_1=1.0)
    with pytest.raises(ConfigError, match="b1: wrong type"):
        configure(optimizer, b1="x")
    with pytest.raises(ConfigError, match="nesterov: wrong type"):
        configure(optimizer, nesterov=1)
    with pytest.raises(RequestError, match="has no parameter 'nope'"):
        configure(layer, "nope=dim")
    with pytest.raises(RequestError, match="has a parameter 'type'"):
        configure(has_type)
    with pytest.raises(ConfigError, match="learning_rate"):
        check(configure(optimizer))
    with pytest.raises(ConfigError, match="learning_rate"):
        configure(optimizer).build()


def test_one_class_per_callable():
    assert configured_class(rate) is configured_class(rate, ()) is type(configure(rate, peak=1.0))
    assert configured_class(layer) is not configured_class(layer, ("num_features=dim",))
    assert configure(rate, peak=1) == configure(rate, peak=1.0)


def test_it_is_a_value_that_can_be_edited_and_pickled():
    node = configure(layer, "num_features=width", epsilon=0.5)
    again = pickle.loads(pickle.dumps(node))
    assert again == node
    assert hash(again) == hash(node)
    assert patch(node, {"epsilon": 0.25}).build(width=1, dim=2, rngs=3)[3] == 0.25
    empty = pickle.loads(pickle.dumps(configure(rate)))
    assert flatten(empty, lambda cls: "rate") == {"type": "rate", "peak": REQUIRED, "steps": 10, "args": ()}
