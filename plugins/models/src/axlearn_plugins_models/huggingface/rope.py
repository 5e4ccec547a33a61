"""Convert rotary position encodings to and from `rope_parameters` (or `rope_theta` and `rope_scaling`) of `config.json`.

transformers 4 writes `rope_theta` and `rope_scaling`. transformers 5 writes `rope_parameters`, with one entry for all
layers, or with one entry per kind of layer. A wrong frequency raises no error and only makes the model worse, so unknown
entries are errors here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from axlearn_core.config.tree import children
from axlearn_core.errors import ConfigError, Problem, RequestError, nearest
from axlearn_plugins_models.huggingface.family import Json, Settings, unsupported

THETA = 10_000.0
FACTOR = "partial_rotary_factor"
PROPORTIONAL = "proportional"
_COMMON = ("rope_type", "rope_theta", FACTOR)


@attrs.frozen
class Kind:
    """A kind of layer with its own frequencies.

    Attributes:
        name: Key in a nested `rope_parameters`.
        base: Key of its theta in files that transformers 4 wrote.
        theta: Default theta.
        scaled: Whether `rope_scaling` of transformers 4 applies to these layers.
        share: Key of the share of a head that rotates.
    """

    name: str
    base: str
    theta: float
    scaled: bool
    share: str = FACTOR


class Entries(Json):
    """Entries of `rope_parameters`.

    Attributes:
        paths: Entry -> its path in `config.json`.
    """

    paths: Mapping[str, str] = MappingProxyType({})


ALL_LAYERS = Kind("", "rope_theta", THETA, scaled=True)


def parameters(hf: Settings, kind: Kind = ALL_LAYERS, kinds: Sequence[Kind] = ()) -> Json:
    """Return the entries in the form of transformers 5, from files of any version.

    Args:
        hf: `config.json`.
        kind: Kind of layer.
        kinds: All kinds of layers in the family. Empty if all layers are alike.

    Raises:
        ConfigError: If two entries contradict each other, or the file has entries for kinds of layers that the family does not
            have.
    """
    path, entries = _entries(hf, kind, kinds)
    merged: Json = {}
    origin: dict[str, str] = {}
    for place, values in (
        (path, entries),
        ("rope_scaling", _mapping(hf, "rope_scaling") if kind.scaled else {}),
        ("", {"rope_theta": hf.get(kind.base), FACTOR: hf.get(kind.share)}),
    ):
        for name, value in values.items():
            if value is None:
                continue
            key = "rope_type" if name == "type" else name
            key_path = f"{place}.{name}" if place else kind.base if name == "rope_theta" else kind.share
            if merged.setdefault(key, value) != value:
                raise _contradiction(key, origin[key], merged[key], key_path, value)
            origin.setdefault(key, key_path)
    result = Entries({"rope_type": "default", "rope_theta": kind.theta, **merged})
    result.paths = origin
    return result


def _mapping(hf: Settings, key: str) -> Mapping[str, Any]:
    value = hf.get(key) or {}
    if not isinstance(value, Mapping):
        raise unsupported(key, value, ["an object"])
    return value


def _entries(hf: Settings, kind: Kind, kinds: Sequence[Kind]) -> tuple[str, Mapping[str, Any]]:
    """Return (path, entries) for a kind of layer, in the form that transformers 5 uses."""
    written = _mapping(hf, "rope_parameters")
    nested = sorted(name for name, value in written.items() if isinstance(value, Mapping))
    names = [k.name for k in kinds]
    if not kinds:
        if nested:
            raise unsupported("rope_parameters", f"entries for {', '.join(nested)}", ["one entry for all layers"])
        return "rope_parameters", written
    if written and sorted(written) != sorted(names):
        raise unsupported(
            "rope_parameters", f"entries for {', '.join(sorted(written))}", [f"entries for {', '.join(names)}"]
        )
    if written and len(nested) < len(written):
        raise unsupported("rope_parameters", dict(written), [f"an object for each of {', '.join(names)}"])
    return f"rope_parameters.{kind.name}", written.get(kind.name, {})


def _contradiction(key: str, first: str, first_value: Any, second: str, second_value: Any) -> ConfigError:
    return ConfigError(
        Problem(
            path=f"config.json: {key}",
            message="has two values",
            got=f"{first}: {first_value}, {second}: {second_value}",
            expected=f"one value; transformers 5 uses {first}",
            fix=f"remove {first} or {second} from config.json, whichever is wrong",
        )
    )


def read_rope(hf: Settings, *, rope: Json | None = None, fraction: float | None = None, **fields: Any) -> Json:
    """Return the config of the position encoding, as plain data.

    Args:
        hf: `config.json`.
        rope: Entries, if they are not those of `parameters`.
        fraction: Share of each head that rotates if the entries have no `partial_rotary_factor`. None if the family always
            rotates whole heads; another share is then an error.
        fields: Other fields of the config.

    Raises:
        ConfigError: If the scaling type is not supported, or an entry is unknown or missing.
    """
    rope = parameters(hf) if rope is None else rope
    paths = rope.paths if isinstance(rope, Entries) else {}

    def path(name: str) -> str:
        return paths.get(name, f"rope_parameters.{name}")

    kind = rope["rope_type"]
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise unsupported(path("rope_type"), kind, SCALINGS)
    if fraction is None and rope.get(FACTOR, 1.0) != 1.0 and kind != PROPORTIONAL:
        raise unsupported(path(FACTOR), rope[FACTOR], [1.0])
    if fraction is not None and kind != PROPORTIONAL:
        fields["fraction"] = float(rope.get(FACTOR, fraction))
    names = (*_COMMON, *ENTRIES[kind], *_IDLE)
    for name in rope:
        if name not in names:
            raise ConfigError(
                Problem(
                    path=f"config.json: {path(name)}",
                    message=f"rope_type {kind} does not have this entry",
                    got=str(rope[name])[:80],
                    expected=f"for rope_type {kind}: {', '.join(names)}",
                    nearest=nearest(name, names),
                    fix="correct its name, or write a family whose settings read it; see docs/huggingface.md",
                )
            )
    return {"type": "rope", "theta": positive_number(rope, "rope_theta"), "scaling": SCALINGS[kind](rope, hf), **fields}


def write_rope(position: Any, *, partial: bool = False) -> Json:
    """Return the `rope_parameters` of a position encoding.

    Args:
        position: Config of the encoding.
        partial: Write the share of each head that rotates, for a family that reads it.

    Raises:
        RequestError: No `rope_type` describes the scaling.
    """
    scaling = position.scaling
    common = {"rope_theta": position.theta, **({FACTOR: position.fraction} if partial else {})}
    if scaling is None:
        return {"rope_type": "default", **common}
    if type(scaling).__name__ not in WRITTEN:
        raise RequestError(
            f"no rope_type describes the scaling {type(scaling).__name__} of the position encoding\n"
            f"    expected: {', '.join(WRITTEN)}\n    fix: use one of these, or a family that writes it; see docs/huggingface.md"
        )
    kind, names = WRITTEN[type(scaling).__name__]
    values = {names[k]: v for k, v in children(scaling).items() if k in names and v is not None}
    return {"rope_type": kind, **common, **values}


def missing_forms(data: Json, kinds: Sequence[Kind] = (ALL_LAYERS,)) -> Json:
    """Return the keys that a `config.json` needs so that transformers 4 and 5 both read the intended frequencies.

    If a file has only `rope_parameters`, transformers 4 silently uses a theta of 10,000.
    """
    several = kinds if len(kinds) > 1 else ()
    entries = {kind: parameters(Settings(data), kind, several) for kind in kinds}
    keys: Json = {"rope_parameters": {k.name: v for k, v in entries.items()} if several else entries[kinds[0]]}
    for kind, entry in entries.items():
        keys[kind.base] = entry["rope_theta"]
        if FACTOR in entry:
            keys[kind.share] = entry[FACTOR]
        if kind.scaled and entry["rope_type"] != "default":
            keys["rope_scaling"] = {k: v for k, v in entry.items() if k not in ("rope_theta", FACTOR)}
    return {key: value for key, value in keys.items() if not data.get(key)}


def positive_number(rope: Json, key: str) -> float:
    """Return an entry. Raise `ConfigError` if it is missing or not a positive number."""
    value = rope.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(
            Problem(
                path=f"config.json: rope_parameters.{key}",
                message=f"rope_type {rope['rope_type']} needs a positive number",
                got="nothing" if value is None else repr(value),
                fix="use the config.json that belongs to the weights",
            )
        )
    return float(value)


def _linear(rope: Json, hf: Settings) -> Json:
    return {"type": "linear-rope-scaling", "factor": positive_number(rope, "factor")}


def _proportional(rope: Json, hf: Settings) -> Json:
    factor = None if rope.get("factor") is None else positive_number(rope, "factor")
    return {"type": "proportional-rope-scaling", "fraction": float(rope.get(FACTOR, 1.0)), "factor": factor}


def _llama3(rope: Json, hf: Settings) -> Json:
    return {
        "type": "llama3-rope-scaling",
        "factor": positive_number(rope, "factor"),
        "original_length": int(positive_number(rope, "original_max_position_embeddings")),
        "low_frequency_factor": positive_number(rope, "low_freq_factor"),
        "high_frequency_factor": positive_number(rope, "high_freq_factor"),
    }


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Return the factor by which YaRN sharpens attention: 0.1 mscale ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def write_mscale(rope: Json, sharpness: float) -> Json:
    """Return YaRN's `rope_parameters` for a model that multiplies its attention scale by `sharpness` ** 2, as DeepSeek does.

    vLLM and DeepSeek's own code read `mscale` and `mscale_all_dim` but not `attention_factor`, so these keys replace it if they are
    equivalent. Rounding `mscale` to ten digits undoes the rounding of the number that was computed from it.
    """
    factor, attention = rope["factor"], rope.get("attention_factor") or 0.0
    if factor <= 1:
        return rope
    all_dims, mscale = (
        round((scale - 1.0) / (0.1 * math.log(factor)), 10) for scale in (sharpness, sharpness * attention)
    )
    if mscale and yarn_scale(factor, mscale) / yarn_scale(factor, all_dims) == attention:
        rope = {key: value for key, value in rope.items() if key != "attention_factor"} | {"mscale": mscale}
    return rope | {"mscale_all_dim": all_dims}


def _yarn(rope: Json, hf: Settings) -> Json:
    factor, attention = positive_number(rope, "factor"), rope.get("attention_factor")
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
    PROPORTIONAL: _proportional,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""`rope_type` -> the scaling config, as plain data."""

_ORIGINAL = "original_max_position_embeddings"
ENTRIES: Mapping[str, Sequence[str]] = {
    "default": (),
    "linear": ("factor",),
    PROPORTIONAL: ("factor",),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor", _ORIGINAL, "beta_fast", "beta_slow", "attention_factor", "truncate", "mscale", "mscale_all_dim",
    ),
}  # fmt: skip
"""`rope_type` -> the entries that it reads, in addition to the common ones."""
_IDLE = (_ORIGINAL, "finetuned")
"""Entries that files may have for any type. They have no effect if the type does not read them."""

_LENGTH = {"factor": "factor", "original_length": "original_max_position_embeddings"}
WRITTEN: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "LinearScaling": ("linear", {"factor": "factor"}),
    "ProportionalScaling": (PROPORTIONAL, {"factor": "factor", "fraction": FACTOR}),
    "Llama3Scaling": (
        "llama3",
        {**_LENGTH, "low_frequency_factor": "low_freq_factor", "high_frequency_factor": "high_freq_factor"},
    ),
    "YarnScaling": (
        "yarn",
        {**_LENGTH, **{n: n for n in ("beta_fast", "beta_slow", "attention_factor", "truncate")}},
    ),
}
"""Class name of the scaling config -> `rope_type` and the names of its fields."""
