"""Tables that pre-norm decoders in Hugging Face format share: `config.json` keys and tensor names."""

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from axlearn_plugins_models.huggingface.family import Family, Json, Key, Settings
from axlearn_plugins_models.huggingface.rope import ALL_LAYERS, Kind, missing_forms, parameters, read_rope, write_rope
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


def bias_key(default: bool, *parts: str) -> Key:
    """Return the mapping of a key that gives projections a bias, such as `attention.query`."""
    return Key(tuple(f"{LAYER}.{part}.bias" for part in parts), default=default, read=bool)


QKV = ("attention.query", "attention.key", "attention.value")
QKVO = (*QKV, "attention.output")
"""Projections of attention, for `bias_key`."""
PLAIN = ("feed_forward.up", "feed_forward.down")
GATED = ("feed_forward.gate", *PLAIN)
"""Projections of a feed-forward layer, for `bias_key`."""


def norm_key(default: float, *norms: str) -> Key:
    """Return the mapping of the epsilon of the final norm and of norms in a layer, such as `post_norm` (default: `norm`)."""
    return Key((*(f"{LAYER}.{n}.eps" for n in norms or ("norm",)), "model.decoder.norm.eps"), default=default, read=float)


def layer_types(every: int, count: int) -> list[str]:
    """Return the `layer_types` of a model in which every nth layer attends to all positions."""
    return ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(count)]


def with_defaults(keys: Mapping[str, str | Key], **defaults: Any) -> dict[str, str | Key]:
    """Return the keys with other defaults."""
    changed = {name: attrs.evolve(_as_key(keys[name]), default=value) for name, value in defaults.items()}
    return {**keys, **changed}


def _as_key(key: str | Key) -> Key:
    return Key(key) if isinstance(key, str) else key


OURS, THEIRS = "decoder.layer", "model.layers.{layer}"
OUTER_RULES = (
    Rule("decoder.embedding.weight", "model.embed_tokens.weight"),
    Rule("decoder.norm.weight", "model.norm.weight"),
    Rule("decoder.norm.bias", "model.norm.bias"),
    Rule("decoder.head.weight", "lm_head.weight", "v d -> d v"),
)


def norm_rules(names: Mapping[str, str], layer: str = THEIRS) -> tuple[Rule, ...]:
    """Return the rules for the norms of a layer: our name -> theirs."""
    parts = ("weight", "bias")
    return tuple(Rule(f"{OURS}.{a}.{part}", f"{layer}.{b}.{part}") for a, b in names.items() for part in parts)


NORM_RULES = norm_rules({"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"})
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


def feed_forward_rules(
    ours: str = "feed_forward",
    theirs: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    layer: str = THEIRS,
) -> tuple[Rule, ...]:
    """Return the rules for the matrices and the biases of a feed-forward layer. A plain one has no gate."""
    return tuple(
        rule
        for part, name in zip(("gate", "up", "down"), names, strict=True)
        for rule in (
            Rule(f"{OURS}.{ours}.{part}.weight", f"{layer}.{theirs}.{name}.weight", "o i -> i o"),
            Rule(f"{OURS}.{ours}.{part}.bias", f"{layer}.{theirs}.{name}.bias"),
        )
    )


FUSED_GATE = Rule(
    (f"{OURS}.feed_forward.gate.weight", f"{OURS}.feed_forward.up.weight"),
    f"{THEIRS}.mlp.gate_up_proj.weight",
    "f* d -> d f",
)
"""Rule for a feed-forward layer whose gate and up projections are one tensor, as in Phi-3 and GLM."""


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


class RopeDecoder(Family):
    """Base class for families with one rotary position encoding for all layers.

    Attributes:
        rope: Names and defaults of the keys for positions.
        fraction: Share of each head that rotates if `config.json` does not say. None if whole heads always rotate.
        interleaved: Whether adjacent elements rotate together.
        norm: Config of the norms, or None for RMSNorm.
        feed_forward: Config of the feed-forward layers, or None for gated ones.
        parallel: Default of `use_parallel_residual`. None if the halves of a layer always follow each other.
        shared_norm: Whether parallel halves share a norm.
    """

    keys: ClassVar = {**SIZES, **HEADS, **DENSE, **NORMS, "tie_word_embeddings": TIED}
    rules = (*OUTER_RULES, *NORM_RULES, *ATTENTION_RULES, *feed_forward_rules())
    ignored = ("*.rotary_emb.inv_freq",)
    rope: ClassVar[Kind] = ALL_LAYERS
    fraction: ClassVar[float | None] = None
    interleaved: ClassVar[bool] = False
    norm: ClassVar[Json | None] = None
    feed_forward: ClassVar[Json | None] = None
    parallel: ClassVar[bool | None] = None
    shared_norm: ClassVar[bool] = True

    def settings(self, hf: Settings) -> Json:
        """Return the settings for the position encoding and the types of the parts."""
        settings: Json = {f"{ATTENTION}.position": self.position(hf)}
        if self.parallel is not None and hf.get(PARALLEL, self.parallel):
            settings[LAYER] = {"type": "parallel-transformer-layer", "shared_norm": self.shared_norm}
        if self.norm is not None:
            settings |= {f"{LAYER}.norm": self.norm, "model.decoder.norm": self.norm}
        return settings | ({} if self.feed_forward is None else {FEED_FORWARD: self.feed_forward})

    def position(self, hf: Settings) -> Json:
        """Return the config of the position encoding."""
        pairs = {"interleaved": True} if self.interleaved else {}
        return read_rope(hf, rope=parameters(hf, self.rope), fraction=self.fraction, **pairs)

    def export_keys(self, config: Any) -> Json:
        """Return the RoPE parameters, and whether the halves of a layer are parallel."""
        layer = config.model.decoder.layer
        fields = {} if self.parallel is None else {PARALLEL: isinstance(layer, ParallelTransformerLayer.Config)}
        return {"rope_parameters": self.rope_parameters(layer.attention), **fields}

    def rope_parameters(self, attention: Any) -> Json:
        """Return the RoPE parameters of the position encoding."""
        return write_rope(attention.position, partial=self.fraction is not None)

    def compatibility_keys(self, data: Json) -> Json:
        """Return the RoPE keys that other versions of transformers need."""
        return missing_forms(data, (self.rope,))
