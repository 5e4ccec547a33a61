"""Every installed feature on a stack of alternating layers, alone and with `interleave`."""

import pytest

import axlearn_core as ax
from axlearn_core.compose import Functional
from axlearn_core.config import find
from axlearn_core.errors import AxlearnError
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_finetune.lora.lora_linear import LoraLinear
from axlearn_plugins_moe.mixture_of_experts import MixtureOfExperts
from axlearn_plugins_quantization.quantized_linear import QuantizedLinear
from axlearn_plugins_rope.rotary import RotaryEmbedding
from axlearn_plugins_transformer.alternate import Alternate
from axlearn_plugins_transformer.attention_variants.alibi import Alibi

LAYER = "model.decoder.layer"
ROPE = {"type": "rope"}
CONFIG = ax.resolve(
    "quickstart",
    set={
        "model.decoder.num_layers": 4,
        "model.decoder.hidden_dim": 32,
        f"{LAYER}.attention.num_heads": 4,
        f"{LAYER}.attention.num_kv_heads": 2,
        f"{LAYER}.attention.position": {"type": "alternate", "children": [ROPE, {**ROPE, "theta": 1e6}]},
        f"{LAYER}.feed_forward": {
            "type": "alternate",
            "first": [{"type": "gated-feed-forward", "hidden_dim": 48}],
            "children": [{"type": "feed-forward", "hidden_dim": 48}, {"type": "gated-feed-forward", "hidden_dim": 64}],
        },
    },
).config
FEATURES = [e.name for e in registry().entries("features")]
REFUSED = {"nope": f"{LAYER}.attention.position: nope cannot change position encodings that already vary by layer"}
"""Features that have no meaning on this config, and what they say."""


def use(name):
    example = registry().feature(name).example
    return f"{name}:{example}" if example else name


def with_(*features):
    """The config, or the text of the refusal."""
    try:
        return resolve(CONFIG, with_=features).config
    except AxlearnError as error:
        return str(error)


@pytest.mark.fast_cases("scan", "schedule-free", "sdc-check", "watchdog")
@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_alone_is_applied_once_and_the_model_can_be_built(name):
    if name in REFUSED:
        assert f"\n{REFUSED[name]}" in with_(use(name))
        return
    resolved = resolve(CONFIG, with_=[use(name), *registry().feature(name).needs])
    for _, feature in resolved.features:
        assert feature.apply(resolved.config) == resolved.config
        assert feature.in_effect(resolved.config)
    assert Functional.from_config(resolved.config.model).num_parameters


def test_any_order_with_interleave_gives_one_tree():
    other_uses = [use(n) for n in FEATURES if n != "interleave"]
    results = {other: (with_(other, "interleave"), with_("interleave", other)) for other in other_uses}
    assert all(one == two for one, two in results.values())
    refused = [other for other, (one, _) in results.items() if isinstance(one, str)]
    assert len(refused) < len(other_uses) / 2


def test_options_reach_what_takes_turns():
    slot = resolve(CONFIG, with_=["rope:theta=7.0"]).config.model.decoder.layer.attention.position
    assert slot == Alternate(children=(RotaryEmbedding.Config(theta=7.0),) * 2)
    assert with_("alibi").model.decoder.layer.attention.position == Alibi.Config()
    assert len(find(with_("moe"), MixtureOfExperts)) == 3
    for feature, kind in (("lora", LoraLinear), ("quantization", QuantizedLinear)):
        result = resolve(CONFIG, with_=[f"{feature}:target=model.**.feed_forward.up"]).config
        assert len(find(result, kind)) == 3
        only = resolve(CONFIG, with_=[f"{feature}:target=model.**.feed_forward.children.1.up"]).config
        assert set(find(only, kind)) == {f"{LAYER}.feed_forward.children.1.up"}
