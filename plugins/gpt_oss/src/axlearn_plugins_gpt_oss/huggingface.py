"""gpt-oss in Hugging Face format. Weights in MXFP4 are converted to floating point when they are imported."""

from typing import Any, ClassVar

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Key, Settings, unsupported
from axlearn_plugins_models.huggingface.rope import write_rope
from axlearn_plugins_models.huggingface.table import Rule

OURS, MLP = f"{d.OURS}.feed_forward", f"{d.THEIRS}.mlp"
EXPERTS, ROUTER = f"{MLP}.experts", f"{MLP}.router"
GATE_AND_UP = tuple(f"{OURS}.{part}" for part in ("gate", "up"))
EVERY = 2
"""The last layer of each group has no window."""


def layer_types(count: int) -> list[str]:
    """Return the kinds of `count` layers, as in `config.json`."""
    return ["sliding_attention" if (i + 1) % EVERY else "full_attention" for i in range(count)]


class GptOss(d.RopeDecoder):
    """gpt-oss: sinks, a window in every second layer, and experts with biases and clamped gates."""

    experiment = "llama3-8b"
    architectures = ("GptOssForCausalLM",)
    keys: ClassVar = {
        **d.MIXTURE, "num_local_experts": f"{d.FEED_FORWARD}.num_experts",
        "intermediate_size": f"{d.FEED_FORWARD}.hidden_dim",
        "swiglu_alpha": Key(f"{d.FEED_FORWARD}.activation.beta", default=1.702),
        "swiglu_limit": Key(f"{d.FEED_FORWARD}.form.limit", default=7.0),
    }  # fmt: skip
    fixed: ClassVar = {"attention_bias": True, "hidden_act": "silu"}
    unused_keys: ClassVar = ("experts_per_token", "initial_context_length")
    rules: ClassVar = (
        *d.OUTER_RULES, *d.NORM_RULES, *d.ATTENTION_RULES,
        Rule(f"{d.OURS}.attention.output.bias", f"{d.THEIRS}.self_attn.o_proj.bias"),
        Rule(f"{d.OURS}.attention.sinks", f"{d.THEIRS}.self_attn.sinks"),
        Rule(f"{OURS}.router.weight", f"{ROUTER}.weight", "e d -> d e"),
        Rule(f"{OURS}.router.logit_bias", f"{ROUTER}.bias"),
        Rule(tuple(f"{p}.weight" for p in GATE_AND_UP), f"{EXPERTS}.gate_up_proj", "e d (f part*) -> e d f"),
        Rule(tuple(f"{p}.bias" for p in GATE_AND_UP), f"{EXPERTS}.gate_up_proj_bias", "e (f part*) -> e f"),
        Rule(f"{OURS}.down.weight", f"{EXPERTS}.down_proj"),
        Rule(f"{OURS}.down.bias", f"{EXPERTS}.down_proj_bias"),
    )  # fmt: skip

    def features(self, hf: Settings) -> dict[str, Json]:
        """Return the options for sinks, windows and experts. Raise `ConfigError` if the layers have another order."""
        expected = layer_types(hf.need("num_hidden_layers"))
        if (kinds := hf.get("layer_types") or expected) != expected:
            raise unsupported("layer_types", kinds, [str(expected)])
        return {
            "attention-sinks": {},
            "interleave": {"every": EVERY, "window": hf.need("sliding_window")}, "moe": {},
        }  # fmt: skip

    def settings(self, hf: Settings) -> Json:
        """Return settings for biases, experts and the position encoding."""
        biases = {f"{d.ATTENTION}.{part}.bias": True for part in ("query", "key", "value", "output")}
        biases |= {f"{d.FEED_FORWARD}.{part}.bias": True for part in ("gate", "up", "down")}
        router = dict.fromkeys((f"{d.FEED_FORWARD}.router.{n}" for n in ("logit_bias", "normalize")), True)
        unit = {"activation": {"type": "swish"}, "form": {"type": "clamped-form"}}
        return super().settings(hf) | router | {f"{d.FEED_FORWARD}.{n}": v for n, v in unit.items()} | biases

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `features` and `settings`."""
        decoder = config.model.decoder
        attention, kinds = decoder.layer.attention, {"layer_types": layer_types(decoder.num_layers)}
        return kinds | {
            "rope_parameters": write_rope(attention.position), "sliding_window": attention.window.children[0].size,
        }  # fmt: skip
