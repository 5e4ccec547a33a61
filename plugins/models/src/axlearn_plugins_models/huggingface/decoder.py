"""Tables that pre-norm decoders in Hugging Face format share: `config.json` keys and tensor names."""

from typing import Any, ClassVar

from axlearn_plugins_models.huggingface.family import Family, Json, Key, Settings
from axlearn_plugins_models.huggingface.rope import (
    ALL_LAYERS,
    FACTOR,
    Kind,
    missing_forms,
    parameters,
    read_rope,
    write_rope,
)
from axlearn_plugins_models.huggingface.table import Rule

LAYER, ATTENTION = "model.decoder.layer", "model.decoder.layer.attention"
FEED_FORWARD = "model.decoder.layer.feed_forward"

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}
"""Names of activations: Hugging Face's -> ours."""

TIED = Key("model.decoder.head", default=False, values={True: None, False: {"type": "head"}})
HEADS = {
    "num_attention_heads": f"{ATTENTION}.num_heads",
    "num_key_value_heads": Key(f"{ATTENTION}.num_kv_heads", default=None),
    "head_dim": Key(f"{ATTENTION}.head_dim", default=None),
}
SIZES = {
    "vocab_size": "model.vocab_size",
    "num_hidden_layers": "model.decoder.num_layers",
    "hidden_size": "model.decoder.hidden_dim",
}
NORMS = {"rms_norm_eps": Key((f"{LAYER}.norm.eps", "model.decoder.norm.eps"), default=1e-6, read=float)}
DENSE = {
    "intermediate_size": f"{FEED_FORWARD}.hidden_dim",
    "hidden_act": Key(f"{FEED_FORWARD}.activation", default="silu", values=ACTIVATIONS),
}

ATTENTION_BIAS = Key(tuple(f"{ATTENTION}.{part}.bias" for part in ("query", "key", "value", "output")), default=False)
QKV_BIAS = Key(tuple(f"{ATTENTION}.{part}.bias" for part in ("query", "key", "value")), default=False)
MLP_BIAS = Key(tuple(f"{FEED_FORWARD}.{part}.bias" for part in ("gate", "up", "down")), default=False)

OURS, THEIRS = "decoder.layer", "model.layers.{layer}"
OUTER_RULES = (
    Rule("decoder.embedding.weight", "model.embed_tokens.weight"),
    Rule("decoder.norm.weight", "model.norm.weight"),
    Rule("decoder.head.weight", "lm_head.weight", "v d -> d v"),
)
NORM_RULES = (
    Rule(f"{OURS}.attention_norm.weight", f"{THEIRS}.input_layernorm.weight"),
    Rule(f"{OURS}.feed_forward_norm.weight", f"{THEIRS}.post_attention_layernorm.weight"),
)
ATTENTION_RULES = (
    *(
        rule
        for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"))
        for rule in (
            Rule(f"{OURS}.attention.{ours}.weight", f"{THEIRS}.self_attn.{theirs}_proj.weight", "(n h) d -> d n h"),
            Rule(f"{OURS}.attention.{ours}.bias", f"{THEIRS}.self_attn.{theirs}_proj.bias", "(n h) -> n h"),
        )
    ),
    Rule(f"{OURS}.attention.output.weight", f"{THEIRS}.self_attn.o_proj.weight", "d (n h) -> n h d"),
    Rule(f"{OURS}.attention.output.bias", f"{THEIRS}.self_attn.o_proj.bias"),
    Rule(f"{OURS}.attention.query_norm.weight", f"{THEIRS}.self_attn.q_norm.weight"),
    Rule(f"{OURS}.attention.key_norm.weight", f"{THEIRS}.self_attn.k_norm.weight"),
)


PARTS = ("gate", "up", "down")


def feed_forward_rules(ours: str = "feed_forward", theirs: str = "mlp") -> tuple[Rule, ...]:
    """Return the rules for the three matrices of a gated feed-forward layer, and for their biases."""
    weights, biases = (
        tuple(Rule(f"{OURS}.{ours}.{part}.{kind}", f"{THEIRS}.{theirs}.{part}_proj.{kind}", pattern) for part in PARTS)
        for kind, pattern in (("weight", "o i -> i o"), ("bias", ""))
    )
    return (*weights, *biases)


def expert_rules(
    theirs: str = "mlp", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[Rule, ...]:
    """Return the rules for the router and for each expert's matrices."""
    return (
        Rule(f"{OURS}.feed_forward.router.weight", f"{THEIRS}.{theirs}.gate.weight", "e d -> d e"),
        *(
            Rule(f"{OURS}.feed_forward.{part}.weight", f"{THEIRS}.{theirs}.experts.{{e}}.{name}.weight", "o i -> e i o")
            for part, name in zip(("gate", "up", "down"), names, strict=True)
        ),
    )


def mixture_rules(
    theirs: str = "mlp", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[Rule, ...]:
    """Return the rules for a decoder with experts in every layer."""
    return (*OUTER_RULES, *NORM_RULES, *ATTENTION_RULES, *expert_rules(theirs, names))


MIXTURE = {
    **SIZES,
    **HEADS,
    **NORMS,
    "tie_word_embeddings": TIED,
    "num_experts_per_tok": f"{FEED_FORWARD}.top_k",
}
"""Keys of a decoder with experts in every layer. Each family has its own keys for the number and the size of the experts."""


FUSED_QKV_RULES = tuple(
    Rule(tuple(f"{OURS}.attention.{part}.{kind}" for part in ("query", "key", "value")), f"{THEIRS}.self_attn.qkv_proj.{kind}", pattern)
    for kind, pattern in (("weight", "(n* h) d -> d n h"), ("bias", "(n* h) -> n h"))
)
"""Queries, keys and values in one tensor."""
FUSED_FEED_FORWARD_RULES = (
    Rule(tuple(f"{OURS}.feed_forward.{part}.weight" for part in ("gate", "up")), f"{THEIRS}.mlp.gate_up_proj.weight", "f* d -> d f"),
    Rule(f"{OURS}.feed_forward.down.weight", f"{THEIRS}.mlp.down_proj.weight", "d f -> f d"),
)
"""`gate` and `up` in one tensor."""


class RopeDecoder(Family):
    """Base class for families with one rotary position encoding for all layers.

    Attributes:
        rope: Where `config.json` describes the encoding.
        interleaved: Rotate adjacent elements of a head instead of its halves.
    """

    keys: ClassVar = {**SIZES, **HEADS, **DENSE, **NORMS, "tie_word_embeddings": TIED}
    rules = (*OUTER_RULES, *NORM_RULES, *ATTENTION_RULES, *feed_forward_rules())
    ignored = ("*.rotary_emb.inv_freq",)
    rope: ClassVar[Kind] = ALL_LAYERS
    interleaved: ClassVar[bool] = False

    def fraction(self, hf: Settings) -> float | None:
        """Return the share of a head that rotates if the file has no `partial_rotary_factor`. None rejects the key."""
        return None

    def settings(self, hf: Settings) -> Json:
        """Return the settings for the position encoding."""
        return {f"{ATTENTION}.position": self.position(hf)}

    def position(self, hf: Settings) -> Json:
        """Return the config of the position encoding, as plain data."""
        rope, default = parameters(hf, self.rope), self.fraction(hf)
        fields: Json = {"interleaved": True} if self.interleaved else {}
        if default is not None:
            fields["fraction"] = rope.pop(FACTOR, default)
        return read_rope(hf, rope=rope, **fields)

    def export_keys(self, config: Any) -> Json:
        """Return the RoPE parameters."""
        position = config.model.decoder.layer.attention.position
        partial = {} if position.fraction == 1 and self.fraction(Settings({})) is None else {FACTOR: position.fraction}
        return {"rope_parameters": {**write_rope(position), **partial}}

    def compatibility_keys(self, data: Json) -> Json:
        """Return the RoPE keys that other versions of transformers need."""
        rope = data["rope_parameters"]
        return missing_forms(data, (self.rope,)) | ({FACTOR: rope[FACTOR]} if FACTOR in rope else {})
