"""Tables that pre-norm decoders in Hugging Face format share: `config.json` keys and tensor names."""

from collections.abc import Mapping
from typing import Any, ClassVar

from axlearn_plugins_models.huggingface.family import Family, Json, Key, Settings
from axlearn_plugins_models.huggingface.rope import (
    ALL_LAYERS,
    Kind,
    missing_forms,
    parameters,
    read_rope,
    write_rope,
)
from axlearn_plugins_models.huggingface.table import Rule
from axlearn_plugins_transformer.parallel_layer import ParallelTransformerLayer

LAYER, ATTENTION = "model.decoder.layer", "model.decoder.layer.attention"
FEED_FORWARD = "model.decoder.layer.feed_forward"
PARALLEL = "use_parallel_residual"

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}
"""Names of activations: Hugging Face's -> ours."""
ACTIVATION_NAMES = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
"""Names of activations: ours -> the first one of Hugging Face's."""

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
PLAIN_BIAS = Key(tuple(f"{FEED_FORWARD}.{part}.bias" for part in ("up", "down")), default=False)
"""Biases of a feed-forward layer without a gate."""

OURS, THEIRS = "decoder.layer", "model.layers.{layer}"
OUTER_RULES = (
    Rule("decoder.embedding.weight", "model.embed_tokens.weight"),
    Rule("decoder.norm.weight", "model.norm.weight"),
    Rule("decoder.norm.bias", "model.norm.bias"),
    Rule("decoder.head.weight", "lm_head.weight", "v d -> d v"),
)


def norm_rules(theirs: str = THEIRS) -> tuple[Rule, ...]:
    """Return the rules for the norms before each half of a layer, whose tensors begin with `theirs`."""
    names = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
    parts = ("weight", "bias")
    return tuple(Rule(f"{OURS}.{a}.{part}", f"{theirs}.{b}.{part}") for a, b in names.items() for part in parts)


NORM_RULES = norm_rules()


def attention_rules(theirs: str = f"{THEIRS}.self_attn") -> tuple[Rule, ...]:
    """Return the rules for attention, whose tensors begin with `theirs`."""
    return (
        *(
            rule
            for ours in ("query", "key", "value")
            for rule in (
                Rule(f"{OURS}.attention.{ours}.weight", f"{theirs}.{ours[0]}_proj.weight", "(n h) d -> d n h"),
                Rule(f"{OURS}.attention.{ours}.bias", f"{theirs}.{ours[0]}_proj.bias", "(n h) -> n h"),
            )
        ),
        Rule(f"{OURS}.attention.output.weight", f"{theirs}.o_proj.weight", "d (n h) -> n h d"),
        Rule(f"{OURS}.attention.output.bias", f"{theirs}.o_proj.bias"),
        Rule(f"{OURS}.attention.query_norm.weight", f"{theirs}.q_norm.weight"),
        Rule(f"{OURS}.attention.key_norm.weight", f"{theirs}.k_norm.weight"),
    )


ATTENTION_RULES = attention_rules()

PROJECTIONS = {part: f"{part}_proj" for part in ("gate", "up", "down")}
"""Names of the projections of a feed-forward layer: ours -> Hugging Face's."""


def feed_forward_rules(
    ours: str = "feed_forward", theirs: str = "mlp", names: Mapping[str, str] = PROJECTIONS, layer: str = THEIRS
) -> tuple[Rule, ...]:
    """Return the rules for the matrices and the biases of a feed-forward layer."""
    weights, biases = (
        tuple(
            Rule(f"{OURS}.{ours}.{part}.{kind}", f"{layer}.{theirs}.{name}.{kind}", axes)
            for part, name in names.items()
        )
        for kind, axes in (("weight", "o i -> i o"), ("bias", ""))
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
    Rule(
        tuple(f"{OURS}.attention.{part}.{kind}" for part in ("query", "key", "value")),
        f"{THEIRS}.self_attn.qkv_proj.{kind}",
        pattern,
    )
    for kind, pattern in (("weight", "(n* h) d -> d n h"), ("bias", "(n* h) -> n h"))
)
"""Queries, keys and values in one tensor."""
FUSED_FEED_FORWARD_RULES = (
    Rule(
        tuple(f"{OURS}.feed_forward.{part}.weight" for part in ("gate", "up")),
        f"{THEIRS}.mlp.gate_up_proj.weight",
        "f* d -> d f",
    ),
    Rule(f"{OURS}.feed_forward.down.weight", f"{THEIRS}.mlp.down_proj.weight", "d f -> f d"),
)
"""`gate` and `up` in one tensor."""


class RopeDecoder(Family):
    """Base class for families with one rotary position encoding for all layers.

    Attributes:
        rope: Where `config.json` describes the encoding.
        interleaved: Rotate adjacent elements of a head instead of its halves.
        norm: Config of the norms, or None for RMSNorm.
        feed_forward: Config of the feed-forward layers, or None for gated ones.
        parallel: Default of `use_parallel_residual`. None if the halves of a layer always follow each other.
        shared_norm: Whether parallel halves share a norm.
    """

    keys: ClassVar = {**SIZES, **HEADS, **DENSE, **NORMS, "tie_word_embeddings": TIED}
    rules = (*OUTER_RULES, *NORM_RULES, *ATTENTION_RULES, *feed_forward_rules())
    ignored = ("*.rotary_emb.inv_freq",)
    rope: ClassVar[Kind] = ALL_LAYERS
    interleaved: ClassVar[bool] = False
    norm: ClassVar[Json | None] = None
    feed_forward: ClassVar[Json | None] = None
    parallel: ClassVar[bool | None] = None
    shared_norm: ClassVar[bool] = True

    def fraction(self, hf: Settings) -> float | None:
        """Return the share of a head that rotates if the file has no `partial_rotary_factor`. None rejects the key."""
        return None

    def settings(self, hf: Settings) -> Json:
        """Return the settings for the position encoding and the kinds of the parts."""
        settings: Json = {f"{ATTENTION}.position": self.position(hf)}
        if self.parallel is not None and hf.get(PARALLEL, self.parallel):
            settings[LAYER] = {"type": "parallel-transformer-layer", "shared_norm": self.shared_norm}
        if self.norm is not None:
            settings |= {f"{LAYER}.norm": self.norm, "model.decoder.norm": self.norm}
        return settings if self.feed_forward is None else settings | {FEED_FORWARD: self.feed_forward}

    def position(self, hf: Settings) -> Json:
        """Return the config of the position encoding, as plain data."""
        fields: Json = {"interleaved": True} if self.interleaved else {}
        return read_rope(hf, rope=parameters(hf, self.rope), fraction=self.fraction(hf), **fields)

    def export_keys(self, config: Any) -> Json:
        """Return the RoPE parameters, and whether the halves of a layer are parallel."""
        layer = config.model.decoder.layer
        fields = {} if self.parallel is None else {PARALLEL: isinstance(layer, ParallelTransformerLayer.Config)}
        partial = self.fraction(Settings({})) is not None
        return {"rope_parameters": write_rope(layer.attention.position, partial=partial), **fields}

    def compatibility_keys(self, data: Json) -> Json:
        """Return the RoPE keys that other versions of transformers need."""
        return missing_forms(data, (self.rope,))
