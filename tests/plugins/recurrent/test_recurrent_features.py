import pytest

from axlearn_core.config import get
from axlearn_core.errors import RequestError
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_recurrent.gated_delta_net import GatedDeltaNet
from axlearn_plugins_recurrent.mamba2 import Mamba2
from axlearn_plugins_transformer.alternate import layer_configs
from axlearn_plugins_transformer.attention import Attention, window_of

SLOT = "model.decoder.layer.attention"


def layers(*features, count=8):
    config = resolve("quickstart", with_=list(features)).config
    return [layer.attention for layer in layer_configs(config.model.decoder.layer, count)]


@pytest.mark.parametrize(
    ("feature", "kind"),
    [("gated-delta-net", GatedDeltaNet), ("kimi-delta-attention", GatedDeltaNet), ("mamba2", Mamba2)],
)
def test_every_fourth_layer_keeps_its_attention(feature, kind):
    before = get(resolve("quickstart").config, SLOT)
    chosen = layers(feature)
    assert [type(c).owner for c in chosen] == [kind, kind, kind, Attention] * 2
    assert chosen[3] == before


def test_no_attention_is_left():
    assert {type(c).owner for c in layers("mamba2:attention_every=0")} == {Mamba2}


def test_later_features_keep_the_recurrent_layers_and_reach_the_attention():
    chosen = layers("gated-delta-net:attention_every=2", "interleave:every=2,window=8", "rope:theta=500000")
    assert [type(c).owner for c in chosen] == [GatedDeltaNet, Attention] * 4
    # Windows alternate between the layers that have attention, not between all layers.
    assert [window_of(c.window) for c in chosen[1::2]] == [8, None, 8, None]
    assert {c.position.theta for c in chosen[1::2]} == {500000.0}


def test_options_apply_to_layers_that_exist():
    config = resolve("quickstart", with_=["gated-delta-net:key_dim=16"]).config
    again = resolve(config, with_=["gated-delta-net:value_dim=32"]).config
    kinds = {type(c).owner: c for c in get(again, SLOT).children}
    assert (kinds[GatedDeltaNet].key_dim, kinds[GatedDeltaNet].value_dim) == (16, 32)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("mamba2", "gated-delta-net", "gated-delta-net cannot change the recurrent layers"),
        ("gated-delta-net", "gated-delta-net:attention_every=2", "cannot change the recurrent layers"),
        ("gated-delta-net", "kimi-delta-attention", "kimi-delta-attention cannot change the recurrent layers"),
        ("kimi-delta-attention", "gated-delta-net", "gated-delta-net cannot change the recurrent layers"),
    ],
)
def test_a_second_kind_is_refused(first, second, message):
    config = resolve("quickstart", with_=[first]).config
    with pytest.raises(RequestError, match=message):
        resolve(config, with_=[second])


def test_attention_that_sees_later_positions_is_refused():
    with pytest.raises(RequestError, match=r"causal: mamba2 cannot replace attention that sees later positions"):
        resolve("vit-tiny", with_=["mamba2"])


def test_context_parallelism_without_attention_is_refused():
    with pytest.raises(RequestError, match=r"context-parallel[\s\S]*expected: an attention layer"):
        resolve("quickstart", with_=["gated-delta-net:attention_every=0", "context-parallel"])


def test_attention_with_an_unknown_number_of_heads_is_refused():
    config = resolve("quickstart", with_=["mla"]).config
    with pytest.raises(RequestError, match=r"cannot take the number of heads(.*\n)+.*gated-delta-net:num_heads=16"):
        resolve(config, with_=["gated-delta-net"])
    assert layers("gated-delta-net:num_heads=2", "mla")[0].num_heads == 2
