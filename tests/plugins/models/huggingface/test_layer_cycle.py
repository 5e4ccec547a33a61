"""Slots whose value differs between layers."""

import json

import pytest

from axlearn_core.errors import ConfigError
from axlearn_plugins_models.huggingface.family import family
from axlearn_plugins_models.huggingface.layer_cycle import (
    cycle_of,
    each_value,
    led_cycle_of,
    window_cycle,
    window_types,
)
from axlearn_plugins_transformer.alternate import Alternate
from axlearn_plugins_transformer.attention_variants.interleave import Window
from support.paths import HF_FIXTURES


def test_the_shortest_cycle_is_used():
    assert cycle_of([3, 3, 3]) == 3
    assert cycle_of([1, 2, 1, 2, 1]) == {"type": "alternate", "children": [1, 2]}
    assert cycle_of([1, 1, 2]) == {"type": "alternate", "children": [1, 1, 2]}


def test_leading_layers_may_differ_from_the_cycle():
    assert led_cycle_of([1, 2, 1, 2]) == cycle_of([1, 2, 1, 2])
    assert led_cycle_of([3, 3]) == 3
    assert led_cycle_of([1, 1, 2, 3, 2, 3, 2]) == {"type": "alternate", "first": [1, 1], "children": [2, 3]}


def test_windows_come_back():
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    slot = Alternate(children=(Window(size=8), Window()))
    assert window_cycle(kinds, 8)["children"] == [{"type": "window", "size": 8}, {"type": "window", "size": None}]
    assert window_types(slot, 3) == (kinds, 8)
    assert window_types(window_cycle(["full_attention"] * 2, 8), 2) == (["full_attention"] * 2, None)
    assert window_types(window_cycle(["sliding_attention"] * 2, 8), 2) == (["sliding_attention"] * 2, 8)
    assert each_value(None, 2) == [None, None]


@pytest.mark.parametrize("change", [lambda kinds: kinds[:-1], lambda kinds: [*kinds[:-1], "linear_attention"]])
@pytest.mark.parametrize(
    "fixture", ["cohere2", "dots1", "exaone-moe", "exaone4", "gemma4", "llama4", "ministral", "olmo3"]
)
def test_layer_types_that_do_not_describe_every_layer_are_errors(fixture, change):
    """A shorter list would otherwise be repeated, and an unknown kind would be read as another."""
    data = json.loads((HF_FIXTURES / fixture / "config.json").read_text())
    with pytest.raises(ConfigError, match="layer_types"):
        family(data["model_type"]).resolve({**data, "layer_types": change(data["layer_types"])})


@pytest.mark.parametrize("fixture", ["cohere2", "exaone-moe"])
def test_a_pattern_must_be_a_number(fixture):
    data = json.loads((HF_FIXTURES / fixture / "config.json").read_text())
    data = {k: v for k, v in data.items() if k != "layer_types"}
    with pytest.raises(ConfigError, match="sliding_window_pattern"):
        family(data["model_type"]).resolve({**data, "sliding_window_pattern": 0})
