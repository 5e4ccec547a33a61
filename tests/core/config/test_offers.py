"""Values that slots offer, and components that require more."""

from typing import Protocol

import pytest

from axlearn_core.config import Configurable, Node, check, configure, interface, node, offers
from axlearn_core.errors import ConfigError


@offers("directory")
class Store(Protocol):
    """A slot's protocol."""


class Plain(Configurable):
    def __init__(self, cfg, *, directory):
        self.directory = directory


class Greedy(Configurable):
    """It cannot be built without a dimension."""

    @node
    class Config(Configurable.Config["Greedy"]):
        dim: int = interface()
        size: int = interface(default=3)

    def __init__(self, cfg, *, directory, volume, unit="m"):
        self.cfg = cfg


def disk(directory, speed=1):
    """Any callable."""
    return directory, speed


class Home(Configurable):
    @node
    class Config(Configurable.Config["Home"]):
        store: Node[Store] = Plain.Config()
        other: Node[Store] | None = None
        many: tuple[Node[Store], ...] = ()
        free: Node[object] | None = None


def problems(cfg):
    with pytest.raises(ConfigError) as error:
        check(cfg)
    return {p.path: p for p in error.value.problems}


def test_what_asks_for_no_more_than_is_offered_passes():
    check(Home.Config(other=Plain.Config(), many=(Plain.Config(), configure(disk, "directory"))))


def test_what_asks_for_more_is_named_with_its_slot():
    actual = problems(Home.Config(store=Greedy.Config(), many=(Plain.Config(), Greedy.Config())))
    assert set(actual) == {"store", "many.1"}
    assert "Greedy.Config requires dim, volume" in str(actual["store"])
    assert "Store, which is offered directory" in str(actual["store"])


def test_configured_callables_by_the_names_that_they_are_filled_from():
    assert set(problems(Home.Config(other=configure(disk, "directory=run_dir")))) == {"other"}


def test_a_slot_that_declares_nothing_admits_everything():
    check(Home.Config(free=Greedy.Config()))


def test_building_without_what_is_needed_names_it():
    with pytest.raises(ConfigError) as error:
        Greedy.Config().build(dim=2, directory=".")
    text = str(error.value)
    assert "Greedy.Config requires 'volume', which its parent does not offer" in text
    assert "offered: dim, directory" in text
    assert Plain.Config().build(directory=".", more=1).directory == "."
