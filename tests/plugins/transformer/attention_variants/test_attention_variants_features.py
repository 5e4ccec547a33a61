"""The features `mla`, `alibi` and `interleave`: their changes, combinations and errors."""

import itertools
from typing import Any

import attrs
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.config import Decoder, Node, diff, encode, get, node, patch, replace_config
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.nn.linear import Linear, Projection
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_rope.feature import Rope
from axlearn_plugins_rope.rotary import RotaryEmbedding
from axlearn_plugins_transformer.alternate import Alternate, layer_configs
from axlearn_plugins_transformer.attention import Attention, window_of
from axlearn_plugins_transformer.attention_variants.alibi import Alibi
from axlearn_plugins_transformer.attention_variants.alibi_feature import UseAlibi
from axlearn_plugins_transformer.attention_variants.interleave import Interleave, Window
from axlearn_plugins_transformer.attention_variants.latent import LatentAttention
from axlearn_plugins_transformer.attention_variants.latent_cache import ContiguousLatentCache
from axlearn_plugins_transformer.attention_variants.mla import UseLatentAttention
from axlearn_plugins_transformer.generate import generate
from axlearn_plugins_transformer.norm import RMSNorm

NAMES = registry()
EXPERIMENTS = (
    "quickstart",
    "llama2-7b",
)  # the conformance and end-to-end suites cover every installed experiment
ATTENTION = "model.decoder.layer.attention"
USES = ["mla", "mla:kv_rank=64,query_rank=0,rope_head_dim=16,value_head_dim=24", "alibi", "interleave",
        "interleave:every=4,window=1024"]  # fmt: skip


@pytest.mark.slow_cases("mla-quickstart")
@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("use", USES)
def test_it_resolves_and_twice_is_once(experiment, use):
    once = resolve(experiment, with_=[use])
    again = resolve(once.config, with_=[use])
    assert again.config == once.config
    assert once.features[0][1].in_effect(once.config)
    assert not once.features[0][1].in_effect(resolve(experiment).config)
    assert Decoder(NAMES).decode(encode(once.config, NAMES), Any) == once.config


def changed(before, after):
    return {c.path: (c.old, c.new) for c in diff(before, after, NAMES.display_name) if c.kind == "changed"}


def test_mla_takes_over_what_both_have():
    before = patch(
        resolve("llama2-70b").config,
        {f"{ATTENTION}.{k}": v for k, v in {"window": 7, "softcap": 2.0, "causal": False}.items()},
    )
    after = UseLatentAttention(kv_rank=256).apply(before)
    assert changed(before, after) == {f"{ATTENTION}.type": ("attention", "latent-attention")}
    old = get(before, ATTENTION)
    expected = LatentAttention.Config(
        num_heads=64, position=old.position, window=7, softcap=2.0, causal=False, kv_rank=256
    )
    assert get(after, ATTENTION) == expected
    assert get(UseLatentAttention(query_rank=0).apply(after), ATTENTION) == attrs.evolve(expected, query_rank=None)
    normed = patch(before, {f"{ATTENTION}.qk_norm": RMSNorm.Config()})
    assert UseLatentAttention(kv_rank=256).apply(normed) == after
    with pytest.raises(ConfigError, match=rf"{ATTENTION}.kv_cache: would be lost"):
        UseLatentAttention().apply(patch(before, {f"{ATTENTION}.kv_cache": ContiguousLatentCache.Config()}))


def test_alibi_takes_the_place_of_any_position_encoding():
    before = resolve("quickstart").config
    for position in (None, RotaryEmbedding.Config(), Alibi.Config()):
        after = UseAlibi().apply(patch(before, {f"{ATTENTION}.position": position}))
        assert after == patch(before, {f"{ATTENTION}.position": Alibi.Config()})
    with pytest.raises(RequestError, match=r"'alibi' .* and 'rope' .* cannot be combined"):
        resolve("quickstart", with_=["rope", "alibi"])


def windows(cfg, layers=8):
    return [window_of(c.attention.window) for c in layer_configs(cfg.model.decoder.layer, layers)]


def test_every_nth_layer_is_global():
    before = resolve("llama2-7b").config
    result = Interleave().apply(before)
    assert windows(result, 4) == [4096, None, 4096, None]
    assert patch(result, {f"{ATTENTION}.window": None}) == before
    assert windows(Interleave(every=6, window=1024).apply(before), 12) == ([1024] * 5 + [None]) * 2
    mistral = patch(before, {f"{ATTENTION}.window": 512})
    assert windows(Interleave().apply(mistral), 4) == [512, None, 512, None]


def test_interleave_sets_options_on_what_interleaves_already():
    first = Interleave(every=3, window=100).apply(resolve("llama2-7b").config)
    assert windows(Interleave().apply(first), 6) == [100, 100, None] * 2
    assert windows(Interleave(every=2).apply(first), 4) == [100, None, 100, None]
    assert windows(Interleave(window=9).apply(first), 3) == [9, 9, None]
    assert windows(Interleave(every=2, window=9).apply(first), 2) == [9, None]


@pytest.mark.parametrize(
    "window",
    [
        Window(size=4),
        Alternate(children=(Window(), Window(size=4))),
        Alternate(children=(Window(size=3), Window(size=4), Window())),
        Alternate(children=(Window(), Window())),
        Alternate(children=(Window(size=3), Window()), first=(Window(),)),
    ],
)
def test_interleave_refuses_windows_of_another_kind(window):
    cfg = patch(resolve("quickstart").config, {f"{ATTENTION}.window": window})
    with pytest.raises(ConfigError, match=rf"{ATTENTION}.window: interleave cannot change"):
        Interleave().apply(cfg)


def test_the_features_reach_into_attention_layers_that_alternate():
    before = resolve("quickstart").config
    old = get(before, ATTENTION)
    cfg = patch(before, {ATTENTION: Alternate(children=(old, attrs.evolve(old, softcap=5.0), old))})
    for feature in (Interleave(window=8), UseLatentAttention(), UseAlibi()):
        cfg = feature.apply(cfg)
    layers = [c.attention for c in layer_configs(cfg.model.decoder.layer, 6)]
    assert {type(c) for c in layers} == {LatentAttention.Config}
    assert {type(c.position) for c in layers} == {Alibi.Config}
    assert [c.softcap for c in layers] == [None, 5.0, None] * 2
    assert [window_of(c.window) for c in layers] == [8, None] * 3


@pytest.mark.parametrize("features", [[UseLatentAttention(), UseAlibi(), Interleave(window=8)],
                                      [UseLatentAttention(), Rope(theta=5e5), Interleave(window=8)]])  # fmt: skip
def test_the_order_of_application_does_not_matter(features):
    before = resolve("llama3-8b").config
    result = set()
    for order in itertools.permutations(features):
        cfg = before
        for feature in order:
            cfg = feature.apply(cfg)
        result.add(cfg)
    assert len(result) == 1


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (UseLatentAttention(), "mla finds no attention"),
        (UseAlibi(), "alibi finds no attention"),
        (Interleave(), "interleave finds no attention"),
    ],
)
def test_a_config_without_attention(feature, message):
    with pytest.raises(ConfigError, match=message):
        feature.apply(RMSNorm.Config())


@pytest.mark.parametrize("use", ["mla:kv_rank=0", "interleave:every=1", "interleave:window=0", "alibi:slope=2"])
def test_options_that_do_not_fit(use):
    with pytest.raises(ConfigError, match=use.partition(":")[2].partition("=")[0]):
        resolve("quickstart", with_=[use])


def test_interleaved_layers_see_as_far_as_they_say(tiny, layer, run):
    """With the same weights, a window of 3 changes the results of all tokens except the first three."""
    small = tiny({"decoder.num_layers": 2})
    tokens = jnp.arange(12, dtype=jnp.int32)[None]
    whole, short = (run(layer(Interleave(window=w).apply(small)), tokens) for w in (12, 3))
    np.testing.assert_allclose(whole[:, :3], short[:, :3], rtol=1e-4, atol=1e-4)
    assert (np.abs(whole[:, 3:] - short[:, 3:]).max(-1) > 1e-3).all()


FEATURES = {
    "mla": [UseLatentAttention()],
    "alibi": [UseAlibi()],
    "all": [UseLatentAttention(kv_rank=12), UseAlibi(), Interleave(window=5)],
}


@pytest.mark.slow
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_a_model_generates_what_it_would_without_a_cache(tiny, features):
    cfg = tiny({"decoder.num_layers": 3})
    for feature in features:
        cfg = feature.apply(cfg)
    model = cfg.build(rngs=nnx.Rngs(1))
    tokens, logits = [5, 17, 3, 60], nnx.jit(lambda m, x: m(x))
    expected = list(tokens)
    for _ in range(10):
        row = jnp.asarray([expected + [9] * (16 - len(expected))])
        expected.append(int(jnp.argmax(logits(model, row)[0, len(expected) - 1])))
    assert list(generate(model, tokens, 10)) == expected[4:]
    assert len(set(expected)) > 4


class GatedAttention(Attention):
    """An attention with another projection."""

    @node
    class Config(Attention.Config):
        gate: Node[Projection] = Linear.Config()


def test_mla_does_not_drop_what_a_variant_of_attention_adds():
    before = replace_config(resolve("quickstart").config, Attention, GatedAttention.Config())
    with pytest.raises(ConfigError, match=rf"{ATTENTION}.gate: would be lost"):
        UseLatentAttention().apply(before)
