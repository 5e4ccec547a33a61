"""Long cycles of layers become short, and keep each kind of layer."""

import pytest

import axlearn_core as ax
from axlearn_core.config import patch
from axlearn_plugins_models.huggingface.prove_export import ExportImport
from axlearn_plugins_transformer.alternate import find_pattern, layer_configs
from axlearn_plugins_verify.prove.case import Case
from axlearn_plugins_verify.prove.shorter_cycles import cycle_lengths, shorten_cycles
from axlearn_plugins_verify.prove.shrink import shrink


def kinds(config):
    decoder = config.model.decoder
    return list(dict.fromkeys(map(repr, layer_configs(decoder.layer, decoder.num_layers))))


def order(config):
    """Return the kind of each layer."""
    decoder = config.model.decoder
    return [kinds(config).index(repr(layer)) for layer in layer_configs(decoder.layer, decoder.num_layers)]


@pytest.mark.parametrize(("experiment", "lengths"), [("bamba-9b", {2}), ("nemotron-h-8b", {3}), ("gemma3-4b", {2})])
def test_a_long_cycle_has_one_layer_of_each_kind(experiment, lengths):
    config = ax.resolve(experiment).config
    short = shorten_cycles(config)
    assert {length for _, length in cycle_lengths(short)} == lengths
    assert kinds(short) == kinds(config)
    assert short.model.decoder.num_layers == config.model.decoder.num_layers


@pytest.mark.parametrize("experiment", ["quickstart", "gemma2-2b", "gpt-oss-20b"])
def test_short_cycles_do_not_change(experiment):
    config = ax.resolve(experiment).config
    assert shorten_cycles(config) == config


def test_an_irregular_cycle_is_scanned_only_in_part():
    """The few layers with attention of LFM2 are at irregular distances, so some of both kinds are outside of its scan."""
    config = ax.resolve("lfm2-350m").config
    short = shrink(config).config
    assert kinds(shorten_cycles(config, irregular=True)) == kinds(config)
    assert "".join("ab"[kind] for kind in order(short)) == "ababaab"
    assert find_pattern(order(short)) == (0, 2, 2)


def test_layers_that_only_lead_stay_in_front():
    config = ax.resolve("kimi-linear-48b-a3b").config  # a dense layer, and 26 with experts
    short = shorten_cycles(config)
    layer = short.model.decoder.layer
    assert (len(layer.attention.first), len(layer.attention.children)) == (0, 2), "its family has no leading ones"
    assert (len(layer.feed_forward.first), len(layer.feed_forward.children)) == (1, 1)
    assert {*kinds(short)} == {*kinds(config)}
    assert ExportImport().skip_reason(Case(shrink(config).config)) is None


@pytest.mark.parametrize(
    ("experiment", "expected", "pattern"),
    [
        ("gemma3n-e2b", "ababcdefgh", (0, 2, 2)),  # the longest run is the sparse layers at the start
        ("gemma3n-e4b", "abcdefghgh", (6, 2, 2)),  # the longest run is the layers at the end that share keys and values
        ("gemma4-e4b", "ababcdef", (0, 2, 2)),
    ],
)
def test_only_the_part_of_a_stack_that_is_scanned_repeats(experiment, expected, pattern):
    config = ax.resolve(experiment).config
    small = shrink(config)
    assert "".join("abcdefgh"[kind] for kind in order(small.config)) == expected
    assert find_pattern(order(small.config)) == pattern
    assert len(kinds(small.config)) == len(kinds(config))
    assert not small.notes, "no operation is lost"
    assert ExportImport().skip_reason(Case(small.config)) is None, "the family can express the order"


@pytest.mark.parametrize("experiment", ["llama4-maverick", "k-exaone"])
def test_short_cycles_of_three_kinds_do_not_change(experiment):
    config = ax.resolve(experiment).config
    assert shorten_cycles(config) == config


def test_layers_that_all_differ_stay():
    config = ax.resolve("bamba-9b").config
    layers = config.model.decoder.layer.attention.children[:10]
    different = [
        patch(layer, {"state_dim": 8 * (i + 1)}) if hasattr(layer, "state_dim") else layer
        for i, layer in enumerate(layers)
    ]
    config = patch(config, {"model.decoder.layer.attention.children": tuple(different), "model.decoder.num_layers": 10})
    assert shorten_cycles(config) == config
