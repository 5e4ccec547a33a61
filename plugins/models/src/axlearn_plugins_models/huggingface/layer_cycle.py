"""Settings that differ between layers, such as windows: a value for each layer <-> an `alternate` with the shortest cycle."""

from collections.abc import Sequence
from typing import Any

from axlearn_plugins_transformer.alternate import Alternate
from axlearn_plugins_transformer.attention_variants.interleave import Window

SLIDING, FULL = "sliding_attention", "full_attention"


def cycle_of(values: Sequence[Any]) -> Any:
    """Return the config of a slot, as plain data, from its value in each layer."""
    sizes = range(1, len(values) + 1)
    period = next(n for n in sizes if all(value == values[i % n] for i, value in enumerate(values)))
    return values[0] if period == 1 else {"type": "alternate", "children": [*values[:period]]}


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
