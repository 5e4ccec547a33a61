"""Settings that differ between layers, such as windows: a value for each layer <-> an `alternate` with the shortest cycle."""

from collections.abc import Callable, Sequence
from typing import Any

from axlearn_plugins_models.huggingface.family import Settings, unsupported
from axlearn_plugins_transformer.alternate import Alternate, shortest_cycle, shortest_parts
from axlearn_plugins_transformer.attention_variants.interleave import Window

SLIDING, FULL = "sliding_attention", "full_attention"
PATTERN = "sliding_window_pattern"


def read_layer_types(
    hf: Settings, default: Callable[[], Sequence[str]], kinds: Sequence[str] = (SLIDING, FULL)
) -> list[str]:
    """Return the `layer_types` of `config.json`.

    Args:
        hf: `config.json`.
        default: Returns the kind of each layer. It is called if the file does not list them.
        kinds: Supported kinds.

    Raises:
        ConfigError: If the number of kinds is wrong, or a kind is unknown.
    """
    types, count = hf.get("layer_types"), hf.need("num_hidden_layers")
    if types is None:
        return [*default()]
    if len(types) != count or {*types} - {*kinds}:
        raise unsupported("layer_types", types, [f"{' or '.join(kinds)} for each of {count} layers"])
    return [*types]


def periodic_types(hf: Settings, default: int) -> list[str]:
    """Return the kind of each layer if every nth layer is global. n is `sliding_window_pattern`, or a default."""
    every = hf.get(PATTERN, default)
    if type(every) is not int or every < 1:
        raise unsupported(PATTERN, every, ["a positive integer, or layer_types"])
    return [SLIDING if (i + 1) % every else FULL for i in range(hf.need("num_hidden_layers"))]


def cycle_of(values: Sequence[Any]) -> Any:
    """Return the config of a slot, as plain data, from its value in each layer."""
    cycle = shortest_cycle(values)
    return cycle[0] if len(cycle) == 1 else {"type": "alternate", "children": cycle}


def led_cycle_of(values: Sequence[Any]) -> Any:
    """Return the config of a slot, as plain data, whose last layers may differ from the first: the leading layers, then a cycle."""
    first, cycle = shortest_parts(values)
    return cycle_of(cycle) if not first else {"type": "alternate", "first": [*first], "children": cycle}


def each_value(slot: Any, count: int) -> list[Any]:
    """Return the value of a slot in each of `count` layers."""
    return [slot.select(i) if isinstance(slot, Alternate) else slot for i in range(count)]


def window_cycle(kinds: Sequence[str], size: int | None) -> Any:
    """Return the config of an attention's `window`, from the `layer_types` of `config.json` and the size of the window."""
    sizes = [size if kind == SLIDING else None for kind in kinds]
    return sizes[0] if len({*sizes}) == 1 else cycle_of([{"type": "window", "size": n} for n in sizes])


def window_types(window: Any, count: int) -> tuple[list[str], int | None]:
    """Return the `layer_types` and the size of the window; the inverse of `window_cycle`."""
    sizes = [value.size if isinstance(value, Window) else value for value in each_value(window, count)]
    return [FULL if n is None else SLIDING for n in sizes], next((n for n in sizes if n is not None), None)
