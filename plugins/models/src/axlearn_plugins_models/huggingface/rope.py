"""Rotary position encodings: `rope_parameters` (or `rope_theta` and `rope_scaling`) of `config.json`, and back."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from axlearn_core.config.tree import children
from axlearn_plugins_models.huggingface.family import Json, Settings, unsupported

THETA = 10_000.0


def parameters(hf: Settings, kind: str | None = None) -> Json:
    """The entries in the form of transformers 5, from files of any version; of one kind of layer where kinds differ."""
    rope = hf.get("rope_parameters") or {}
    if kind is not None and isinstance(rope.get(kind), Mapping):
        rope = rope[kind]
    scaling = hf.get("rope_scaling") or {}
    fields = {"rope_theta": hf.get("rope_theta", THETA), **scaling, **rope}
    fields["rope_type"] = fields.pop("rope_type", None) or scaling.get("type", "default")
    return fields


def read_rope(hf: Settings, *, rope: Json | None = None, **fields: Any) -> Json:
    """The node of the position encoding as plain data.

    Args:
        hf: `config.json`.
        rope: the entries, where they are not those of `parameters`.
        fields: other fields of the node.

    Raises:
        ConfigError: a type of scaling that there is no node for.
    """
    rope = parameters(hf) if rope is None else rope
    kind = rope["rope_type"]
    if kind not in SCALINGS:
        raise unsupported("rope_parameters.rope_type", kind, SCALINGS)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise unsupported("rope_parameters.partial_rotary_factor", rope["partial_rotary_factor"], [1.0])
    return {"type": "rope", "theta": float(rope["rope_theta"]), "scaling": SCALINGS[kind](rope, hf), **fields}


def write_rope(position: Any) -> Json:
    """`rope_parameters` of a position encoding."""
    scaling = position.scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": position.theta}
    kind, names = WRITTEN[type(scaling).__name__]
    values = {names[k]: v for k, v in children(scaling).items() if k in names and v is not None}
    return {"rope_type": kind, "rope_theta": position.theta, **values}


def _linear(rope: Json, hf: Settings) -> Json:
    return {"type": "linear-rope-scaling", "factor": float(rope["factor"])}


def _llama3(rope: Json, hf: Settings) -> Json:
    return {
        "type": "llama3-rope-scaling",
        "factor": float(rope["factor"]),
        "original_length": int(rope["original_max_position_embeddings"]),
        "low_frequency_factor": float(rope["low_freq_factor"]),
        "high_frequency_factor": float(rope["high_freq_factor"]),
    }


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """0.1 mscale ln(factor) + 1: how YaRN sharpens attention."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(rope: Json, hf: Settings) -> Json:
    factor, attention = float(rope["factor"]), rope.get("attention_factor")
    if attention is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        attention = yarn_scale(factor, rope["mscale"]) / yarn_scale(factor, rope["mscale_all_dim"])
    return {
        "type": "yarn-rope-scaling",
        "factor": factor,
        "original_length": int(rope.get("original_max_position_embeddings") or hf["max_position_embeddings"]),
        "beta_fast": float(rope.get("beta_fast") or 32),
        "beta_slow": float(rope.get("beta_slow") or 1),
        "attention_factor": None if attention is None else float(attention),
        "truncate": rope.get("truncate", True),
    }


SCALINGS: Mapping[str, Callable[[Json, Settings], Json | None]] = {
    "default": lambda rope, hf: None,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""`rope_type` -> the scaling as plain data."""

_LENGTH = {"factor": "factor", "original_length": "original_max_position_embeddings"}
WRITTEN: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "LinearScaling": ("linear", {"factor": "factor"}),
    "Llama3Scaling": (
        "llama3",
        {**_LENGTH, "low_frequency_factor": "low_freq_factor", "high_frequency_factor": "high_freq_factor"},
    ),
    "YarnScaling": (
        "yarn",
        {**_LENGTH, **{n: n for n in ("beta_fast", "beta_slow", "attention_factor", "truncate")}},
    ),
}
"""Class of the scaling node -> `rope_type` and the names of its fields."""
