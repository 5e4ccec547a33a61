"""Qwen3-Next and the text models of Qwen3.5 in Hugging Face format."""

from typing import Any, ClassVar

from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.depth_tensors import ONE_DEPTH
from axlearn_plugins_models.huggingface.family import Family, Json, Key, Settings, unsupported
from axlearn_plugins_models.huggingface.rope import missing_forms, parameters, read_rope, write_rope
from axlearn_plugins_models.huggingface.table import Rule
from axlearn_plugins_recurrent.gated_delta_net import GatedDeltaNet
from axlearn_plugins_transformer.attention import Attention

OURS, LINEAR, FULL = f"{d.OURS}.attention", f"{d.THEIRS}.linear_attn", f"{d.THEIRS}.self_attn"
KEYS, VALUES = "(g h*) d -> d g h", "(g (r h)*) d -> d (g r) h"
INTERVAL, ROTARY = "full_attention_interval", "partial_rotary_factor"


def linear_attention_rules() -> tuple[Rule, ...]:
    """Return the rules for the layers with a gated DeltaNet."""
    paths = {
        name: tuple(f"{OURS}.{part}" for part in parts.split())
        for name, parts in {
            "qkvz": "query.weight key.weight value.weight gate.weight",
            "ba": "strength.weight decay.weight",
            "conv": "convolutions.query.weight convolutions.key.weight convolutions.value.weight",
        }.items()
    }
    heads = {"g": "linear_num_key_heads"}
    return (
        Rule(paths["qkvz"], f"{LINEAR}.in_proj_qkvz.weight", (KEYS, KEYS, VALUES, VALUES), within=GatedDeltaNet),
        Rule(paths["ba"], f"{LINEAR}.in_proj_ba.weight", "(g r*) d -> d (g r)", within=GatedDeltaNet, sizes=heads),
        Rule(paths["conv"], f"{LINEAR}.conv1d.weight", "(n h)* 1 w -> w n h"),
        Rule(f"{OURS}.output.weight", f"{LINEAR}.out_proj.weight", "d (n h) -> n h d", within=GatedDeltaNet),
        Rule(f"{OURS}.norm.weight", f"{LINEAR}.norm.weight"),
        Rule(f"{OURS}.log_rate", f"{LINEAR}.A_log"),
        Rule(f"{OURS}.time_bias", f"{LINEAR}.dt_bias"),
    )


def separate_rules() -> tuple[Rule, ...]:
    """Return the rules of Qwen3.5, whose files do not mix the projections of a gated DeltaNet by head."""
    heads, parts = "(n h)* d -> d n h", ("query", "key", "value")
    return (
        Rule(tuple(f"{OURS}.{p}.weight" for p in parts), f"{LINEAR}.in_proj_qkv.weight", heads, within=GatedDeltaNet),
        Rule(f"{OURS}.gate.weight", f"{LINEAR}.in_proj_z.weight", heads.replace("*", ""), within=GatedDeltaNet),
        Rule(f"{OURS}.strength.weight", f"{LINEAR}.in_proj_b.weight", "n d -> d n", within=GatedDeltaNet),
        Rule(f"{OURS}.decay.weight", f"{LINEAR}.in_proj_a.weight", "n d -> d n", within=GatedDeltaNet),
    )


class Qwen3Next(Family):
    """Qwen3-Next: three layers with a gated DeltaNet for each layer with gated attention, and experts in every layer."""

    experiment = "llama3-8b"
    architectures = ("Qwen3NextForCausalLM",)
    common = True
    keys: ClassVar = {
        **d.SIZES,
        "tie_word_embeddings": d.TIED,
        "num_experts": f"{d.FEED_FORWARD}.num_experts",
        "num_experts_per_tok": f"{d.FEED_FORWARD}.top_k",
        "moe_intermediate_size": f"{d.FEED_FORWARD}.hidden_dim",
        "shared_expert_intermediate_size": f"{d.FEED_FORWARD}.shared.hidden_dim",
        "norm_topk_prob": Key(f"{d.FEED_FORWARD}.router.normalize", default=True),
    }
    fixed: ClassVar = {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu"}
    unused_keys: ClassVar = ("intermediate_size",)
    ignored: ClassVar = ("mtp.*",)
    depths: ClassVar = ONE_DEPTH
    experts: ClassVar[dict[str, Json]] = {"moe": {"shared_experts": 1}}
    image_entries: ClassVar = ("mrope_section", "mrope_interleaved")  # they divide frequencies among axes of images
    rules: ClassVar = (
        *d.mixture_rules(),
        *d.feed_forward_rules("feed_forward.shared", "mlp.shared_expert"),
        Rule(f"{d.OURS}.feed_forward.shared_gate.weight", f"{d.THEIRS}.mlp.shared_expert_gate.weight", "o d -> d o"),
        Rule(
            (f"{OURS}.query.weight", f"{OURS}.output_gate.weight"),
            f"{FULL}.q_proj.weight",
            "(n h*) d -> d n h",
            within=Attention,
        ),
        *linear_attention_rules(),
    )

    def interval(self, hf: Settings) -> int:
        """Return n, if every nth layer has attention. Raise `ConfigError` if the layers have another order."""
        every, kinds = hf.get(INTERVAL), hf.get("layer_types")
        if every is None:
            every = max(kinds.index("full_attention") + 1, 2) if kinds and "full_attention" in kinds else 4
        if every < 2:
            raise unsupported(INTERVAL, every, ["at least 2"])
        count = hf.need("num_hidden_layers")
        expected = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
        if (kinds or expected) != expected:
            raise unsupported("layer_types", kinds, [str(expected)])
        return every

    def features(self, hf: Settings) -> dict[str, Json]:
        """Return the options for linear attention and experts."""
        linear = {
            "num_heads": hf.need("linear_num_value_heads"),
            "num_key_heads": hf.need("linear_num_key_heads"),
            "key_dim": hf.need("linear_key_head_dim"),
            "value_dim": hf.need("linear_value_head_dim"),
        }
        return {"gated-delta-net": {**linear, "attention_every": self.interval(hf)}, **self.experts}

    def settings(self, hf: Settings) -> Json:
        """Return settings for the norms, gated attention, and the gate of the shared expert."""
        eps, last = float(hf.get("rms_norm_eps", 1e-6)), self.interval(hf) - 1
        norm = {"type": "rms-norm", "eps": eps, "offset": 1.0, "init": {"type": "constant-initializer"}}
        rope = parameters(hf)
        for name in self.image_entries:
            rope.pop(name, None)
        fraction = rope.pop(ROTARY, 0.25)
        attention = {
            "type": "attention",
            "output_gate": {"type": "linear"},
            "num_heads": hf.need("num_attention_heads"),
            "num_kv_heads": hf.get("num_key_value_heads", 2),
            "head_dim": hf.get("head_dim", 256),
            "qk_norm": norm,
            "position": read_rope(hf, rope=rope, fraction=fraction),
        }
        linear = {"norm.eps": eps, "convolution.width": hf.get("linear_conv_kernel_dim", 4)}
        return {
            f"{d.LAYER}.norm": norm,
            "model.decoder.norm": norm,
            **({f"{d.FEED_FORWARD}.shared_gate": {"type": "linear"}} if self.experts else {}),
            f"{d.ATTENTION}.children.{last}": attention,
            **{f"{d.ATTENTION}.children.{i}.{name}": v for i in range(last) for name, v in linear.items()},
        }

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `features` and `settings`."""
        decoder = config.model.decoder
        children = decoder.layer.attention.children
        linear, attention, every = children[0], children[-1], len(children)
        return {
            "layer_types": [
                "linear_attention" if (i + 1) % every else "full_attention" for i in range(decoder.num_layers)
            ],
            INTERVAL: every,
            "rms_norm_eps": decoder.norm.eps,
            "num_attention_heads": attention.num_heads,
            "num_key_value_heads": attention.num_kv_heads or attention.num_heads,
            "head_dim": attention.head_dim or decoder.hidden_dim // attention.num_heads,
            "linear_num_value_heads": linear.num_heads,
            "linear_num_key_heads": linear.num_key_heads or linear.num_heads,
            "linear_key_head_dim": linear.key_dim or decoder.hidden_dim // linear.num_heads,
            "linear_value_head_dim": linear.value_dim or linear.key_dim,
            "linear_conv_kernel_dim": linear.convolution.width,
            "rope_parameters": {**write_rope(attention.position), ROTARY: attention.position.fraction},
        }

    def compatibility_keys(self, data: Json) -> Json:
        """Return the RoPE keys that other versions of transformers need."""
        hidden = {} if "intermediate_size" in data else {"intermediate_size": 3 * data["hidden_size"]}
        return {**missing_forms(data), ROTARY: data["rope_parameters"][ROTARY], **hidden}


class Qwen35Moe(Qwen3Next):
    """The text model of Qwen3.5 with experts; the weights of a token's experts sum to 1."""

    architectures = ("Qwen3_5MoeForCausalLM",)
    common = False
    depths: ClassVar = None
    keys: ClassVar = {name: key for name, key in Qwen3Next.keys.items() if name != "norm_topk_prob"}
    fixed: ClassVar = {"attention_bias": False, "hidden_act": "silu"}
    rules: ClassVar = (*Qwen3Next.rules, *separate_rules())
    experts: ClassVar = {"moe": {"shared_experts": 1, "router": {"type": "softmax-router", "normalize": True}}}


class Qwen35(Qwen35Moe):
    """The text model of Qwen3.5 without experts."""

    architectures = ("Qwen3_5ForCausalLM",)
    keys: ClassVar = {**d.SIZES, "tie_word_embeddings": d.TIED, "intermediate_size": f"{d.FEED_FORWARD}.hidden_dim"}
    unused_keys = ()
    rules: ClassVar = (*Qwen35Moe.rules, *d.feed_forward_rules())
    experts: ClassVar = {}
