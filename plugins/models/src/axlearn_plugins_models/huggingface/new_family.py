"""Describe an installed family, so that `axlearn plugins new --family` can write a package with a similar one."""

import json
from typing import Any

from axlearn_core.compose import Functional
from axlearn_core.errors import AxlearnError, RequestError
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_models.huggingface.family import KIND, PREFIX, Family, Json, families, family

TINY = {
    **dict.fromkeys(("vocab_size",), 2048),  # the rows of the quickstart's tokenizer
    **dict.fromkeys(("hidden_size", "n_embd"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "sliding_window"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "linear_num_key_heads", "n_group"), 2),
    **dict.fromkeys(("_sliding_window_pattern", "full_attention_interval"), 2),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
}
"""Maximum sizes of the tiny model in the tests of a new family, by the key of `config.json`."""
LAYERS, NUM_LAYERS = ("num_hidden_layers", "n_layer"), 2
LARGEST = 2048
"""Largest axis of a tiny model."""


def describe_family(model_type: str) -> dict[str, Any]:
    """Return the facts about an installed family from which a similar one is written.

    Args:
        model_type: The installed family.

    Returns:
        `module`, `class_name` and `distribution` of the family; `config_json` of a tiny model; and its `tensors`, name -> shape.

    Raises:
        RequestError: If the family is not installed, does not read text, or has no experiment to take the sizes from.
    """
    like = family(model_type)
    entry = registry().claims["components"][PREFIX + model_type][0]
    if not like.text:
        raise RequestError(f"the {KIND} {model_type!r} does not read text\n    fix: use --like with another family")
    data = _tiny_config(like, entry.distribution)
    model = Functional.from_config(_model(like, data))
    return {
        "module": type(like).__module__,
        "class_name": type(like).__name__,
        "distribution": entry.distribution,
        "config_json": data,
        "tensors": {name: list(tensor.shape) for name, tensor in sorted(like.layout(model, data).items())},
    }


def _tiny_config(like: Family, distribution: str) -> Json:
    """Return the `config.json` of a tiny model, from an experiment that the family describes."""
    for name, entries in sorted(registry().claims["experiments"].items()):
        if entries[0].distribution != distribution:
            continue
        try:
            config: Any = resolve(name).config
            data = like.config_json(config)
            if like.differences(data, config):
                continue
            data = _shrink(data)
            tensors = like.layout(Functional.from_config(_model(like, data)), data)
        except (AttributeError, AxlearnError, LookupError, TypeError, ValueError):
            continue  # the experiment is of another family, or cannot be shrunk
        if max(max(tensor.shape, default=0) for tensor in tensors.values()) <= LARGEST:
            return data
    raise RequestError(
        f"there is no experiment of {distribution} from which a tiny {like.model_type} can be made\n"
        f"    fix: use --like with another family: {', '.join(n for n in families() if n != like.model_type)}"
    )


def _shrink(data: Json) -> Json:
    """Return a `config.json` with small sizes."""
    layers = {data[key] for key in LAYERS if key in data}
    tiny: Json = {}
    for key, value in data.items():
        if key in LAYERS:
            value = NUM_LAYERS
        elif isinstance(value, list) and len(value) in layers:
            value = value[-NUM_LAYERS:]  # a period ends with the kind of layer that is rarer
        elif type(value) is int and key in TINY:
            value = min(value, TINY[key])
        tiny[key] = value
    return json.loads(json.dumps(tiny))


def _model(like: Family, data: Json) -> Any:
    config: Any = like.resolve(data)[0].config
    return config.model
