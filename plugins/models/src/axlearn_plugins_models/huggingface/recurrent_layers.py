"""Parts of families whose layers have either a recurrent layer or attention: orders of layers, configs and tensors."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from axlearn_core.errors import ConfigError, Problem
from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface.family import Json, Settings, unsupported
from axlearn_plugins_models.huggingface.table import Rule
from axlearn_plugins_recurrent.gated_delta_net import GatedDeltaNet
from axlearn_plugins_recurrent.mamba2 import Mamba2
from axlearn_plugins_transformer.alternate import shortest_cycle

OURS, PARTS = f"{d.OURS}.attention", ("query", "key", "value")
RECURRENT, ATTENTION = "linear_attention", "full_attention"
PUBLISHED = {RECURRENT: "mamba", ATTENTION: "attention"}
"""Kinds of layers -> their names in published files with Mamba-2, which all versions of transformers read."""


def mamba2_rules(theirs: str) -> tuple[Rule, ...]:
    """Return the rules for Mamba-2 layers, whose files store all projections as one tensor."""
    projections = tuple(f"{OURS}.{p}.weight" for p in ("gate", "value", "key", "query", "step"))
    patterns = (*["(h p)* d -> d h p"] * 4, "h* d -> d h")
    convolutions = [f"{OURS}.convolutions.{p}" for p in reversed(PARTS)]
    return (
        Rule(projections, f"{theirs}.in_proj.weight", patterns, within=Mamba2),
        Rule(
            tuple(f"{c}.weight" for c in convolutions), f"{theirs}.conv1d.weight", "(h p)* 1 w -> w h p", within=Mamba2
        ),
        Rule(tuple(f"{c}.bias" for c in convolutions), f"{theirs}.conv1d.bias", "(h p)* -> h p", within=Mamba2),
        Rule(f"{OURS}.norm", f"{theirs}.norm.weight", "(h p) -> h p"),
        Rule(f"{OURS}.output.weight", f"{theirs}.out_proj.weight", "d (h p) -> h p d", within=Mamba2),
        Rule(f"{OURS}.log_rate", f"{theirs}.A_log"),
        Rule(f"{OURS}.step_bias", f"{theirs}.dt_bias"),
        Rule(f"{OURS}.skip", f"{theirs}.D"),
    )


def kimi_delta_rules(theirs: str) -> tuple[Rule, ...]:
    """Return the rules for Kimi delta attention."""
    heads, convolution = "(n h) d -> d n h", "(n h) 1 w -> w n h"
    rules = [
        rule
        for part in PARTS
        for rule in (
            Rule(f"{OURS}.{part}.weight", f"{theirs}.{part[0]}_proj.weight", heads, within=GatedDeltaNet),
            Rule(f"{OURS}.convolutions.{part}.weight", f"{theirs}.{part[0]}_conv1d.weight", convolution),
        )
    ]
    for part, name in (("decay", "f"), ("gate", "g")):
        rules += [
            Rule(f"{OURS}.{part}_down.weight", f"{theirs}.{name}_a_proj.weight", "r d -> d r"),
            Rule(f"{OURS}.{part}.weight", f"{theirs}.{name}_b_proj.weight", "(n h) r -> r n h", within=GatedDeltaNet),
        ]
    return (
        *rules,
        Rule(f"{OURS}.strength.weight", f"{theirs}.b_proj.weight", "n d -> d n"),
        Rule(f"{OURS}.norm.weight", f"{theirs}.o_norm.weight", within=GatedDeltaNet),
        Rule(f"{OURS}.output.weight", f"{theirs}.o_proj.weight", "d (n h) -> n h d", within=GatedDeltaNet),
        Rule(f"{OURS}.log_rate", f"{theirs}.A_log", "1 1 n 1 -> n"),
        Rule(f"{OURS}.time_bias", f"{theirs}.dt_bias", "(n h) -> n h"),
    )


def make_kinds(count: int, attention: Sequence[int]) -> list[str]:
    """Return the kind of each of `count` layers, given the numbers of those with attention, from 0."""
    return [ATTENTION if i in attention else RECURRENT for i in range(count)]


def read_kinds(hf: Settings, default: Sequence[str]) -> list[str]:
    """Return the kind of each layer, in the names of transformers 5.

    Args:
        hf: `config.json`.
        default: Kinds if the file does not list them.

    Raises:
        ConfigError: If the number of kinds is wrong, or a kind is unknown.
    """
    names = {name: kind for kind, name in PUBLISHED.items()}
    kinds = [names.get(kind, kind) for kind in hf.get("layer_types") or default]
    if len(kinds) != hf.need("num_hidden_layers") or {*kinds} - {RECURRENT, ATTENTION}:
        raise unsupported("layer_types", kinds, [f"{RECURRENT} or {ATTENTION} for each layer"])
    return kinds


def alternate(kinds: Sequence[str], parts: Mapping[str, Json]) -> Json:
    """Return the config of the attention slot, whose children are the shortest sequence that `kinds` repeats."""
    return {"type": "alternate", "children": [parts[kind] for kind in shortest_cycle(kinds)]}


def split_kinds(decoder: Any, recurrent: type) -> tuple[list[str], Any, Any]:
    """Return the kind of each layer, the recurrent layer's config, and that of attention; the inverse of `alternate`.

    Args:
        decoder: Config of the decoder.
        recurrent: Class of the recurrent layer's config.

    Raises:
        ConfigError: If the model does not have both kinds.
    """
    layers = [decoder.layer.attention.select(i) for i in range(decoder.num_layers)]
    by_kind = {RECURRENT if isinstance(x, recurrent) else ATTENTION: x for x in reversed(layers)}
    if len(by_kind) < 2:
        message = "the file of this family describes both kinds of layers, but the model has only one"
        raise ConfigError(Problem(path=d.ATTENTION, message=message, got=", ".join(by_kind)))
    kinds = [RECURRENT if isinstance(x, recurrent) else ATTENTION for x in layers]
    return kinds, by_kind[RECURRENT], by_kind[ATTENTION]


def check_step_limit(hf: Settings) -> None:
    """Raise `ConfigError` if the time steps of Mamba-2 layers are limited."""
    low, high = hf.get("time_step_limit") or (0.0, math.inf)
    if low or (float(high["__float__"]) if isinstance(high, dict) else high) != math.inf:
        raise unsupported("time_step_limit", [low, high], ["[0.0, Infinity]"])


def read_eps(hf: Settings) -> float:
    """Return the constant of the norms."""
    return float(hf.get("rms_norm_eps", d.NORMS["rms_norm_eps"].default))


def read_mamba2(hf: Settings) -> Json:
    """Return the config of Mamba-2 layers."""
    inner, heads = hf.get("mamba_expand", 2) * hf.need("hidden_size"), hf.get("mamba_n_heads", 128)
    size = hf.get("mamba_d_head", "auto")
    return {
        "type": "mamba2", "num_heads": heads, "head_dim": inner // heads if size == "auto" else size, "inner_dim": inner,
        "state_dim": hf.get("mamba_d_state", 256), "num_groups": hf.get("mamba_n_groups", 1), "eps": read_eps(hf),
        "convolution": {"type": "short-convolution", "width": hf.get("mamba_d_conv", 4), "bias": hf.get("mamba_conv_bias", True)},
    }  # fmt: skip


def write_mamba2(layer: Any, width: int) -> Json:
    """Return the `config.json` keys of Mamba-2 layers in a model of this width; the inverse of `read_mamba2`."""
    return {
        "mamba_n_heads": layer.num_heads, "mamba_d_head": layer.head_dim, "mamba_d_state": layer.state_dim,
        "mamba_n_groups": layer.num_groups, "mamba_expand": layer.num_heads * layer.head_dim // width,
        "mamba_d_conv": layer.convolution.width, "mamba_conv_bias": layer.convolution.bias,
    }  # fmt: skip


def read_kimi_delta(hf: Settings) -> Json:
    """Return the config of Kimi delta attention."""
    linear = hf.get("linear_attn_config") or {}
    size = linear.get("head_dim", hf.get("linear_head_dim", 128))
    width = linear.get("short_conv_kernel_size", hf.get("linear_conv_kernel_dim", 4))
    return {
        "type": "gated-delta-net", "num_heads": linear.get("num_heads", hf.get("linear_num_heads", 32)), "key_dim": size,
        "decay_per": "element", "rank": size, "gate_activation": "sigmoid", "norm": {"type": "rms-norm", "eps": read_eps(hf)},
        "convolution": {"type": "short-convolution", "width": width},
    }  # fmt: skip


def write_kimi_delta(layer: Any, kinds: Sequence[str]) -> Json:
    """Return the `config.json` keys of Kimi delta attention and of the order of layers, whose first has the number 1."""
    places = {name: [i + 1 for i, k in enumerate(kinds) if k == kind]
              for name, kind in (("full_attn_layers", ATTENTION), ("kda_layers", RECURRENT))}  # fmt: skip
    sizes = {"head_dim": layer.key_dim, "num_heads": layer.num_heads, "short_conv_kernel_size": layer.convolution.width}
    return {"linear_attn_config": {**places, **sizes}, "layer_types": [*kinds]}
