"""Long cycles of layers become short, and keep each kind of layer."""

import pytest

import axlearn_core as ax
from axlearn_core.config import patch
from axlearn_plugins_transformer.alternate import layer_configs
from axlearn_plugins_verify.prove.shorter_cycles import cycle_lengths, shorten_cycles


def kinds(config):
    decoder = config.model.decoder
    return list(dict.fromkeys(map(repr, layer_configs(decoder.layer, decoder.num_layers))))


@pytest.mark.parametrize(("experiment", "lengths"), [("bamba-9b", {2}), ("nemotron-h-8b", {3})])
def test_a_long_cycle_has_one_layer_of_each_kind(experiment, lengths):
    config = ax.resolve(experiment).config
    short = shorten_cycles(config)
    assert {length for _, length in cycle_lengths(short)} == lengths
    assert kinds(short) == kinds(config)
    assert short.model.decoder.num_layers == config.model.decoder.num_layers


@pytest.mark.parametrize("experiment", ["quickstart", "gemma3-4b", "gpt-oss-20b"])
def test_short_cycles_do_not_change(experiment):
    config = ax.resolve(experiment).config
    assert shorten_cycles(config) == config


def test_leading_layers_become_part_of_the_cycle():
    config = ax.resolve("kimi-linear-48b-a3b").config
    short = shorten_cycles(config)
    assert [*cycle_lengths(short)] != [*cycle_lengths(config)]
    assert kinds(short) == kinds(config)


def test_layers_that_all_differ_stay():
    config = ax.resolve("bamba-9b").config
    layers = config.model.decoder.layer.attention.children[:10]
    different = [
        patch(layer, {"state_dim": 8 * (i + 1)}) if hasattr(layer, "state_dim") else layer
        for i, layer in enumerate(layers)
    ]
    config = patch(config, {"model.decoder.layer.attention.children": tuple(different), "model.decoder.num_layers": 10})
    assert shorten_cycles(config) == config
