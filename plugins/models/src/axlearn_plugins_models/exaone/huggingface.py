"""EXAONE 4 in Hugging Face format."""

from typing import Any, ClassVar

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Settings, unsupported
from axlearn_plugins_models.huggingface.rope import write_rope
from axlearn_plugins_transformer.alternate import Alternate

PATTERN, WINDOW = "sliding_window_pattern", "sliding_window"


class Exaone4(d.RopeDecoder):
    """EXAONE 4: norms only after each half of a layer, and windows.

    In models with windows, every nth layer attends to all positions and has no position encoding.
    """

    experiment = "llama3-8b"
    architectures = ("Exaone4ForCausalLM",)
    keys: ClassVar = {
        **d.RopeDecoder.keys,
        "rms_norm_eps": d.norm_key(1e-5, "post_norm", "attention.qk_norm"),
    }
    rules = (
        *d.OUTER_RULES, *d.ATTENTION_RULES, *d.feed_forward_rules(),
        *d.norm_rules({"attention_post_norm": "post_attention_layernorm",
                       "feed_forward_post_norm": "post_feedforward_layernorm"}),
    )  # fmt: skip

    def interval(self, hf: Settings) -> int | None:
        """Return n, if every nth layer attends to all positions, or None if there are no windows.

        Raises:
            ConfigError: If the layers have another order.
        """
        kinds, pattern, count = hf.get("layer_types"), hf.get(PATTERN, 4), hf.need("num_hidden_layers")
        if hf.get(WINDOW, 4096) is None:
            if "sliding_attention" in (kinds or ()):
                raise unsupported(WINDOW, None, ["a size, because layer_types has sliding_attention"])
            return None
        every = kinds.index("full_attention") + 1 if kinds and "full_attention" in kinds else pattern
        if type(every) is not int or every < 2:
            raise unsupported(PATTERN if kinds is None else "layer_types", kinds or pattern, ["an interval of at least 2"])
        if (kinds or d.layer_types(every, count)) != d.layer_types(every, count):
            raise unsupported("layer_types", kinds, [str(d.layer_types(every, count))])
        return every

    def features(self, hf: Settings) -> dict[str, Json]:
        """Return the options for the windows, and for the layers without a position encoding."""
        every = self.interval(hf)
        if every is None:
            return {}
        return {"interleave": {"every": every, "window": hf.get(WINDOW, 4096)}, "nope": {"every": every}}

    def settings(self, hf: Settings) -> Json:
        """Return settings for the norms and the position encoding."""
        rope, norm, every = self.position(hf), {"type": "rms-norm"}, self.interval(hf)
        position = rope if every is None else {"type": "alternate", "children": [*[rope] * (every - 1), None]}
        return {
            f"{d.LAYER}.norm": None,
            f"{d.LAYER}.post_norm": norm,
            f"{d.ATTENTION}.qk_norm": norm,
            f"{d.ATTENTION}.position": position,
        }

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `features` and `settings`."""
        attention, count = config.model.decoder.layer.attention, config.model.decoder.num_layers
        windows, position = attention.window, attention.position
        if not isinstance(windows, Alternate):
            kinds = ["full_attention"] * count
            return {WINDOW: windows, PATTERN: None, "layer_types": kinds, "rope_parameters": write_rope(position)}
        every = len(windows.children)
        return {
            WINDOW: windows.children[0].size, PATTERN: every, "layer_types": d.layer_types(every, count),
            "rope_parameters": write_rope(position.select(0)),
        }  # fmt: skip
