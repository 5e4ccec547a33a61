"""Rotary position encodings: `rope_parameters` (or `rope_theta` and `rope_scaling`) of `config.json`, and back."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from axlearn_core.config.tree import children
from axlearn_plugins_huggingface.family import Json, Settings, unsupported

THETA = 10_000.0


def parameters(hf: Settings, kind: str | None = None) -> Json:
    """The entries as transformers 5 writes them, whatever version wrote them; of a kind of layer where they differ."""
    found = hf.get("rope_parameters") or {}
    if kind is not None and isinstance(found.get(kind), Mapping):
        found = found[kind]
    scaling = hf.get("rope_scaling") or {}
    made = {"rope_theta": hf.get("rope_theta", THETA), **scaling, **found}
    made["rope_type"] = made.pop("rope_type", None) or scaling.get("type", "default")
    return made


def read_rope(hf: Settings, *, found: Json | None = None, **fields: Any) -> Json:
    """The node of the position encoding as plain data.

    Args:
        hf: `config.json`.
        found: the entries, where they are not those of `parameters`.
        fields: other fields of the node.

    Raises:
        ConfigError: a type of scaling that there is no node for.
    """
    found = parameters(hf) if found is None else found
    kind = found["rope_type"]
    if kind not in SCALINGS:
        raise unsupported("rope_parameters.rope_type", kind, SCALINGS)
    if found.get("partial_rotary_factor", 1.0) != 1.0:
        raise unsupported("rope_parameters.partial_rotary_factor", found["partial_rotary_factor"], [1.0])
    return {"type": "rope", "theta": float(found["rope_theta"]), "scaling": SCALINGS[kind](found, hf), **fields}


def write_rope(position: Any) -> Json:
    """`rope_parameters` of a position encoding."""
    scaling = position.scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": position.theta}
    kind, names = WRITTEN[type(scaling).__name__]
    values = {names[k]: v for k, v in children(scaling).items() if k in names and v is not None}
    return {"rope_type": kind, "rope_theta": position.theta, **values}


def _linear(found: Json, hf: Settings) -> Json:
    return {"type": "linear-rope-scaling", "factor": float(found["factor"])}


def _llama3(found: Json, hf: Settings) -> Json:
    return {
        "type": "llama3-rope-scaling",
        "factor": float(found["factor"]),
        "original_length": int(found["original_max_position_embeddings"]),
        "low_frequency_factor": float(found["low_freq_factor"]),
        "high_frequency_factor": float(found["high_freq_factor"]),
    }


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """0.1 mscale ln(factor) + 1: how YaRN sharpens attention."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(found: Json, hf: Settings) -> Json:
    factor, attention = float(found["factor"]), found.get("attention_factor")
    if attention is None and found.get("mscale") and found.get("mscale_all_dim"):
        attention = yarn_scale(factor, found["mscale"]) / yarn_scale(factor, found["mscale_all_dim"])
    return {
        "type": "yarn-rope-scaling",
        "factor": factor,
        "original_length": int(found.get("original_max_position_embeddings") or hf["max_position_embeddings"]),
        "beta_fast": float(found.get("beta_fast") or 32),
        "beta_slow": float(found.get("beta_slow") or 1),
        "attention_factor": None if attention is None else float(attention),
        "truncate": found.get("truncate", True),
    }


SCALINGS: Mapping[str, Callable[[Json, Settings], Json | None]] = {
    "default": lambda found, hf: None,
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
