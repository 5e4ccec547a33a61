"""Slots whose value differs between layers."""

from axlearn_plugins_models.huggingface.layer_cycle import cycle_of, each_value, window_cycle, window_types
from axlearn_plugins_transformer.alternate import Alternate
from axlearn_plugins_transformer.attention_variants.interleave import Window


def test_the_shortest_cycle_is_used():
    assert cycle_of([3, 3, 3]) == 3
    assert cycle_of([1, 2, 1, 2, 1]) == {"type": "alternate", "children": [1, 2]}
    assert cycle_of([1, 1, 2]) == {"type": "alternate", "children": [1, 1, 2]}


def test_windows_come_back():
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    slot = Alternate(children=(Window(size=8), Window()))
    assert window_cycle(kinds, 8)["children"] == [{"type": "window", "size": 8}, {"type": "window", "size": None}]
    assert window_types(slot, 3) == (kinds, 8)
    assert window_types(window_cycle(["full_attention"] * 2, 8), 2) == (["full_attention"] * 2, None)
    assert window_types(window_cycle(["sliding_attention"] * 2, 8), 2) == (["sliding_attention"] * 2, 8)
    assert each_value(None, 2) == [None, None]
