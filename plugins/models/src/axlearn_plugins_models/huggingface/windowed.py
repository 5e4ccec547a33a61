"""Decoders whose layers alternate between sliding windows and global attention, as `layer_types` says."""

from collections.abc import Sequence
from typing import Any, ClassVar

from axlearn_core.config import patch
from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Settings
from axlearn_plugins_models.huggingface.layer_cycle import (
    FULL,
    SLIDING,
    cycle_of,
    each_value,
    periodic_types,
    read_layer_types,
    window_cycle,
    window_types,
)
from axlearn_plugins_models.huggingface.rope import write_rope

POSITION, WINDOW = f"{d.ATTENTION}.position", f"{d.ATTENTION}.window"


class WindowedDecoder(d.RopeDecoder):
    """Base class for families with windows in some layers.

    Attributes:
        every: n, if every nth layer is global by default.
        window: Default size of a window.
        global_positions: Whether layers with global attention have a position encoding.
    """

    every: ClassVar[int] = 4
    window: ClassVar[int] = 4096
    global_positions: ClassVar[bool] = True

    def kinds(self, hf: Settings) -> list[str]:
        """Return the `layer_types`. Without them, every nth layer is global."""
        return read_layer_types(hf, lambda: periodic_types(hf, self.every))

    def settings(self, hf: Settings) -> Json:
        """Return settings for the position encodings and the windows."""
        settings, size = super().settings(hf), hf.get("sliding_window", self.window)
        kinds = self.kinds(hf)
        if size is None:
            return settings
        if not self.global_positions:
            settings[POSITION] = cycle_of([settings[POSITION] if kind == SLIDING else None for kind in kinds])
        return settings | {WINDOW: window_cycle(kinds, size)}

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `settings`."""
        decoder = config.model.decoder
        kinds, size = window_types(decoder.layer.attention.window, decoder.num_layers)
        if not self.global_positions:
            positions = each_value(decoder.layer.attention.position, decoder.num_layers)
            config = patch(config, {POSITION: next(filter(None, positions), None)})
        return super().export_keys(config) | {"layer_types": kinds, "sliding_window": size}


def attention_keys(attention: Sequence[Any]) -> Json:
    """Return the `config.json` keys of layers whose positions, windows and keys differ by kind, as in Gemma 3n and 4.

    Args:
        attention: Config of each layer's attention.
    """
    kinds = [FULL if one.window is None else SLIDING for one in attention]
    by_kind = dict(zip(kinds, attention, strict=True))
    wide, near = by_kind[FULL], by_kind.get(SLIDING, by_kind[FULL])
    return {
        "layer_types": kinds,
        "sliding_window": near.window or 512,
        "num_attention_heads": wide.num_heads,
        "num_key_value_heads": near.num_kv_heads,
        "head_dim": near.head_dim,
        "num_kv_shared_layers": sum(one.kv_source is not None for one in attention),
        "rope_parameters": {SLIDING: write_rope(near.position), FULL: write_rope(wide.position)},
    }
