"""Experiments that the suite for features selects."""

import pytest

from axlearn_core.config import Node, find
from axlearn_core.plugins.registry import registry
from axlearn_testing.feature import select_experiments


@pytest.mark.slow
def test_selected_experiments_have_every_component():
    selection, names = select_experiments(), {e.name for e in registry().entries("experiments")}
    kinds = {name: {type(part) for part in find(registry().experiment(name), Node).values()} for name in names}
    assert set().union(*(kinds[name] for name in selection)) == set().union(*kinds.values())
    assert len(selection) < len(names) / 3
