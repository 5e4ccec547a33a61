"""Nemotron-H (arXiv 2504.03624), Nemotron Nano 2 and Nemotron 3 Nano in Hugging Face format."""

from collections.abc import Sequence
from typing import Any, ClassVar

from axlearn_core.config import get_fields
from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface import recurrent_layers as r
from axlearn_plugins_models.huggingface.family import Family, Json, Key, Settings, unsupported
from axlearn_plugins_models.huggingface.layer_cycle import cycle_of, each_value
from axlearn_plugins_models.huggingface.table import Rule
from axlearn_plugins_moe.mixture_of_experts import MixtureOfExperts
from axlearn_plugins_recurrent.mamba2 import Mamba2

THEIRS, FEED, UNGATED = "backbone.layers.{layer}", f"{d.OURS}.feed_forward", {"up": "up_proj", "down": "down_proj"}
MIXER, PATTERN, SHARED = f"{THEIRS}.mixer", "hybrid_override_pattern", "moe_shared_expert_intermediate_size"
LETTERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "moe": "E", "mlp": "-"}
Fields = dict[str, tuple[str, Any]]
MAMBA: Fields = {"mamba_num_heads": ("num_heads", 128), "mamba_head_dim": ("head_dim", 64), "n_groups": ("num_groups", 8),
                 "ssm_state_size": ("state_dim", 128)}  # fmt: skip
CONVOLUTION: Fields = {"conv_kernel": ("width", 4), "use_conv_bias": ("bias", True)}
ATTENTION: Fields = {"num_attention_heads": ("num_heads", 32), "num_key_value_heads": ("num_kv_heads", 8),
                     "head_dim|attention_head_dim": ("head_dim", 128)}  # fmt: skip
EXPERTS: Fields = {"n_routed_experts": ("num_experts", 8), "num_experts_per_tok": ("top_k", 2),
                   "moe_intermediate_size": ("hidden_dim", 7688)}  # fmt: skip
ROUTER: Fields = {"norm_topk_prob": ("normalize", True), "routed_scaling_factor": ("scale", 1.0), "n_group": ("num_groups", 1),
                  "topk_group": ("top_groups", 1)}  # fmt: skip
DENSE: Fields = {"intermediate_size": ("hidden_dim", 21_504)}
"""Key of `config.json` -> field of a part of a layer, and its default."""


def read(hf: Settings, fields: Fields) -> Json:
    """Return the fields of a part of a layer."""
    return {name: hf.get(key, default) for key, (name, default) in fields.items()}


def write(part: Any, fields: Fields) -> Json:
    """Return the keys of a part of a layer; the inverse of `read`."""
    return {} if part is None else {key.partition("|")[0]: get_fields(part)[name] for key, (name, _) in fields.items()}


class NemotronH(Family):
    """Nemotron-H: each layer has either Mamba-2, attention without positions, a feed-forward layer, or experts."""

    experiment = "llama3-8b"
    architectures = ("NemotronHForCausalLM",)
    keys: ClassVar = {
        "vocab_size": "model.vocab_size", "hidden_size": "model.decoder.hidden_dim",
        "layer_norm_epsilon": Key((f"{d.LAYER}.norm.eps", "model.decoder.norm.eps"), default=1e-5, read=float),
    }  # fmt: skip
    fixed: ClassVar = {
        "attention_bias": False, "mamba_proj_bias": False, "mlp_bias": False, "use_bias": False, "tie_word_embeddings": False,
        "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2", "moe_latent_size": None, "sliding_window": None,
    }  # fmt: skip
    unused_keys = (
        "chunk_size", "expand", "hidden_dropout", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap",
        "mtp_hybrid_override_pattern", "mtp_layers_block_type", "n_shared_experts", "norm_eps", "num_logits_to_keep",
        "partial_rotary_factor", "rescale_prenorm_residual", "residual_in_fp32", "rms_norm_eps", "time_step_floor",
        "time_step_max", "time_step_min", "use_mamba_kernels",
    )  # fmt: skip
    rules: ClassVar = (
        Rule("decoder.embedding.weight", "backbone.embeddings.weight"),
        Rule("decoder.norm.weight", "backbone.norm_f.weight"),
        Rule("decoder.head.weight", "lm_head.weight", "v d -> d v"),
        *(Rule(f"{d.OURS}.{half}_norm.weight", f"{THEIRS}.norm.weight") for half in ("attention", "feed_forward")),
        *d.attention_rules(MIXER), *r.mamba2_rules(MIXER), *d.feed_forward_rules("feed_forward", "mixer", UNGATED, THEIRS),
        *d.feed_forward_rules("feed_forward.shared", "mixer.shared_experts", UNGATED, THEIRS),
        *(Rule(f"{FEED}.{a}.weight", f"{MIXER}.experts.{{e}}.{b}.weight", "o i -> e i o") for a, b in UNGATED.items()),
        Rule(f"{FEED}.router.weight", f"{MIXER}.gate.weight", "e d -> d e"),
        Rule(f"{FEED}.router.bias", f"{MIXER}.gate.e_score_correction_bias"),
    )  # fmt: skip

    def ignored_tensors(self, hf: Settings) -> Sequence[str]:
        """Return the pattern of the layers that predict more than the next token."""
        return ("mtp.*",)

    def pattern(self, hf: Settings) -> str:
        """Return a letter for each layer. Raise `ConfigError` if a kind is unknown, or the number of layers differs."""
        kinds: list[str] = hf.get("layers_block_type") or hf.get("layer_types") or []
        pattern = "".join(LETTERS.get(k, k) for k in kinds) if kinds else hf.need(PATTERN)
        count, key = hf.get("num_hidden_layers") or len(pattern), "layers_block_type" if kinds else PATTERN
        if {*pattern} - {*LETTERS.values()}:
            raise unsupported(key, kinds or pattern, LETTERS if kinds else dict.fromkeys(LETTERS.values()))
        if count != len(pattern):
            raise unsupported("num_hidden_layers", count, [f"{len(pattern)}, the number of layers in {key}"])
        return pattern

    def settings(self, hf: Settings) -> Json:
        """Return the settings for the kinds of layers."""
        pattern, mamba, attention = self.pattern(hf), read(hf, MAMBA), read(hf, ATTENTION)
        r.check_step_limit(hf)
        plain = {"type": "feed-forward", "activation": "relu_squared"}
        mixers: Json = {
            "M": {"type": "mamba2", **mamba, "inner_dim": mamba["num_heads"] * mamba["head_dim"],
                  "eps": float(hf.get("layer_norm_epsilon", 1e-5)),
                  "convolution": {"type": "short-convolution", **read(hf, CONVOLUTION)}},
            "*": {"type": "attention", **attention},
        }  # fmt: skip
        layers: Json = {
            "-": plain | read(hf, DENSE),
            "E": {"type": "mixture-of-experts", "gate": None, "activation": "relu_squared", **read(hf, EXPERTS),
                  "router": {"type": "sigmoid-router", **read(hf, ROUTER)},
                  "shared": plain | {"hidden_dim": hf.get(SHARED, 7688)}},
        }  # fmt: skip
        return {
            "model.decoder.num_layers": len(pattern),
            d.ATTENTION: cycle_of([mixers.get(letter) for letter in pattern]),
            d.FEED_FORWARD: cycle_of([layers.get(letter) for letter in pattern]),
        }

    def export_keys(self, config: Any) -> Json:
        """Return the `config.json` keys; the inverse of `settings`."""
        layer, count = config.model.decoder.layer, config.model.decoder.num_layers
        parts = zip(each_value(layer.attention, count), each_value(layer.feed_forward, count), strict=True)
        letters, first = "", dict[str, Any]()
        for mixer, feed in parts:
            part = feed if mixer is None else mixer
            kinds = {"M": Mamba2.Config, "E": MixtureOfExperts.Config, "*": object if feed is None else ()}
            letters += next((letter for letter, kind in kinds.items() if isinstance(part, kind)), "-")
            first.setdefault(letters[-1], part)
        mamba, experts = first.get("M"), first.get("E")
        shared = {} if experts is None else {SHARED: experts.shared.hidden_dim} | write(experts.router, ROUTER)
        return {
            PATTERN: letters, "num_hidden_layers": count, **write(mamba, MAMBA), **write(experts, EXPERTS), **shared,
            **write(mamba and mamba.convolution, CONVOLUTION), **write(first.get("*"), ATTENTION), **write(first.get("-"), DENSE),
        }  # fmt: skip
