"""The features `mla`, `alibi` and `interleave`: what they change, with one another, and what they refuse."""

import itertools
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.config import Decoder, diff, encode, find, get, patch
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.nn.alternate import Alternate, layer_configs
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_attention.alibi import Alibi
from axlearn_plugins_attention.alibi_feature import UseAlibi
from axlearn_plugins_attention.interleave import Interleave
from axlearn_plugins_attention.latent import LatentAttention
from axlearn_plugins_attention.mla import UseLatentAttention
from axlearn_plugins_rope.feature import Rope
from axlearn_plugins_rope.rotary import RotaryEmbedding
from axlearn_plugins_transformer.attention import Attention
from axlearn_plugins_transformer.generate import generate
from axlearn_plugins_transformer.norm import RMSNorm

NAMES = registry()
EXPERIMENTS = [e.name for e in NAMES.entries("experiments")]
ATTENTION = "model.decoder.layer.attention"
USES = ["mla", "mla:kv_rank=64,query_rank=0,rope_head_dim=16,value_head_dim=24", "alibi", "interleave",
        "interleave:every=4,window=1024"]  # fmt: skip


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("use", USES)
def test_it_resolves_on_every_experiment_and_twice_is_once(experiment, use):
    once = resolve(experiment, with_=[use])
    again = resolve(once.config, with_=[use])
    assert again.config == once.config
    assert once.features[0][1].in_effect(once.config)
    assert not once.features[0][1].in_effect(resolve(experiment).config)
    assert Decoder(NAMES).decode(encode(once.config, NAMES), Any) == once.config


def changed(before, after):
    return {c.path: (c.old, c.new) for c in diff(before, after, NAMES.shown_name) if c.kind == "changed"}


def test_mla_takes_over_what_both_have():
    before = patch(
        resolve("llama2-70b").config, {f"{ATTENTION}.{k}": v for k, v in {"window": 7, "softcap": 2.0}.items()}
    )
    after = UseLatentAttention(kv_rank=256).apply(before)
    assert changed(before, after) == {f"{ATTENTION}.type": ("attention", "latent-attention")}
    old = get(before, ATTENTION)
    expected = LatentAttention.Config(num_heads=64, position=old.position, window=7, softcap=2.0, kv_rank=256)
    assert get(after, ATTENTION) == expected
    assert get(UseLatentAttention(query_rank=0).apply(after), ATTENTION) == attrs.evolve(expected, query_rank=None)
    with pytest.raises(ConfigError, match=rf"{ATTENTION}.qk_norm: would be lost"):
        UseLatentAttention().apply(patch(before, {f"{ATTENTION}.qk_norm": RMSNorm.Config()}))


def test_alibi_takes_the_place_of_any_position_encoding():
    before = resolve("quickstart").config
    for position in (None, RotaryEmbedding.Config(), Alibi.Config()):
        after = UseAlibi().apply(patch(before, {f"{ATTENTION}.position": position}))
        assert after == patch(before, {f"{ATTENTION}.position": Alibi.Config()})
    with pytest.raises(RequestError, match=r"'alibi' .* and 'rope' .* cannot be used together"):
        resolve("quickstart", with_=["rope", "alibi"])


def windows(cfg, layers=8):
    return [c.attention.window for c in layer_configs(cfg.model.decoder.layer, layers)]


def test_every_nth_layer_is_global():
    before = resolve("llama2-7b").config
    assert windows(Interleave().apply(before), 4) == [4096, None, 4096, None]
    gemma3 = Interleave(every=6, window=1024).apply(before)
    assert windows(gemma3, 12) == ([1024] * 5 + [None]) * 2
    assert {attrs.evolve(c, window=None) for c in get(gemma3, ATTENTION).children} == {get(before, ATTENTION)}
    mistral = patch(before, {f"{ATTENTION}.window": 512})
    assert windows(Interleave().apply(mistral), 4) == [512, None, 512, None]


def test_interleave_sets_options_on_an_alternation_of_windows():
    first = Interleave(every=3, window=100).apply(resolve("llama2-7b").config)
    assert windows(Interleave().apply(first), 6) == [100, 100, None] * 2
    assert windows(Interleave(every=2).apply(first), 4) == [100, None, 100, None]
    assert windows(Interleave(window=9).apply(first), 3) == [9, 9, None]
    assert windows(Interleave(every=2, window=9).apply(first), 2) == [9, None]
    other = patch(first, {f"{ATTENTION}.children.0.softcap": 5.0})
    with pytest.raises(ConfigError, match=rf"{ATTENTION}: interleave cannot set the windows"):
        Interleave().apply(other)
    mixed = patch(first, {ATTENTION: Alternate(children=(get(first, ATTENTION).children[0], RMSNorm.Config()))})
    with pytest.raises(ConfigError, match="alternate in something else"):
        Interleave().apply(mixed)


def test_the_other_features_reach_into_an_alternation():
    cfg = Interleave(window=8).apply(resolve("quickstart").config)
    latent = UseLatentAttention().apply(UseAlibi().apply(cfg))
    assert [type(c) for c in get(latent, ATTENTION).children] == [LatentAttention.Config] * 2
    assert windows(latent, 2) == [8, None]
    assert all(isinstance(c.position, Alibi.Config) for c in get(latent, ATTENTION).children)


@pytest.mark.parametrize("features", [[UseLatentAttention(), UseAlibi(), Interleave(window=8)],
                                      [UseLatentAttention(), Rope(theta=5e5), Interleave(window=8)]])  # fmt: skip
def test_the_order_of_application_does_not_matter(features):
    before = resolve("llama3-8b").config
    made = set()
    for order in itertools.permutations(features):
        cfg = before
        for feature in order:
            cfg = feature.apply(cfg)
        made.add(cfg)
    assert len(made) == 1


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


def test_interleaved_layers_see_as_far_as_they_say(tiny, run):
    """With windows as long as the text the model is the plain one, with the same weights; with shorter ones it is not."""
    tokens = jax.random.randint(jax.random.key(7), (1, 12), 0, 64)
    small = tiny({"decoder.num_layers": 2})
    whole, short = (run(Interleave(window=w).apply(small).build(rngs=nnx.Rngs(3)), tokens) for w in (12, 3))
    assert find(small, Attention)
    np.testing.assert_allclose(whole[:, :3], short[:, :3], rtol=1e-5, atol=1e-5)
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
