"""`config check` and `config explain` print the components and settings that a feature replaces or resets."""

from typing import Any

import pytest

from axlearn_core.config import find, node, patch
from axlearn_core.errors import RequestError
from axlearn_core.plugins.feature import Feature
from axlearn_core.plugins.lost_settings import MOST, check_not_hidden, describe_lost, find_lost_settings
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.resolve import resolve

ATTENTION, CONSTANT = "model.decoder.layer.attention", "constant-initializer"


def decisions(experiment, *features):
    return [str(d) for d in resolve(experiment, with_=features).decisions if d.kind == "replaced"]


@pytest.mark.parametrize(
    ("experiment", "features", "expected"),
    [
        ("quickstart", ["rope", "lora", "moe", "dropout:rate=0.1", "quantization", "ema", "paged-cache"], []),
        ("quickstart", ["alibi"], [f"replaced: {ATTENTION}.position (rope -> alibi, by feature alibi)"]),
        (
            "quickstart",
            ["optimizer:component=lion"],
            ["replaced: learner.optimizer (muon(momentum=0.8, embedding_rate=5.0) -> lion, by feature optimizer)"],
        ),
        (
            "quickstart",
            ["mamba2"],
            [f"replaced: {ATTENTION}.output.init.scale (0.01 only in some layers, by feature mamba2)"],
        ),
        ("gpt2-124m", ["mla"], [f"replaced: {ATTENTION}.num_kv_heads (12 -> (removed), by feature mla)"]),
        ("gemma2-2b", ["remat:policy=none"], ["replaced: model.decoder.stack.remat (remat -> None, by feature remat)"]),
    ],
)
def test_the_decisions_of_features(experiment, features, expected):
    assert decisions(experiment, *features) == expected


def test_a_feature_that_replaces_the_setting_of_another_names_it():
    ring = resolve("quickstart", with_=["context-parallel"]).config
    (decision,) = decisions(ring, "paged-cache")
    assert decision == f"replaced: {ATTENTION}.kernel ('ring' -> None, by feature paged-cache)"
    before = patch(registry().experiment("quickstart"), {f"{ATTENTION}.kernel": "ring"})
    after = patch(before, {f"{ATTENTION}.kernel": None})
    (decision,) = describe_lost(
        before, after, "second", {f"{ATTENTION}.kernel": "feature first (toy 1.0)"}, registry().display_name
    )
    assert decision.reason == "'ring', set by feature first, -> None, by feature second"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {ATTENTION: {"type": "attention", "num_heads": 4}},
            [f"replaced: {ATTENTION}.sinks ({CONSTANT}, set by feature attention-sinks, -> None, by the request)"],
        ),
        ({f"{ATTENTION}.sinks": None}, []),
        ({f"{ATTENTION}.sinks.value": 1.0}, []),
        ({ATTENTION: {"type": "attention", "num_heads": 4, "sinks": {"type": CONSTANT}}}, []),
        ({"model.**.num_heads": 4}, []),
    ],
    ids=["component", "value", "field", "component with the value", "pattern"],
)
def test_a_setting_of_a_component_names_the_values_that_it_removes(settings, expected):
    resolved = resolve("quickstart", with_=["attention-sinks"], set=settings)
    lost = [str(d) for d in resolved.decisions if "set by feature" in str(d)]
    assert lost == expected


def test_a_value_inside_a_component_that_the_setting_names_is_reported():
    attention = {ATTENTION: {"type": "attention", "num_heads": 4}}
    resolved = resolve("quickstart", with_=["gated-delta-net", "output-gate"], set=attention)
    assert resolved.config.model.decoder.layer.attention.output_gate is None
    assert any("output_gate" in str(d) and "feature output-gate" in str(d) for d in resolved.decisions)


def test_defaults_and_additions_are_not_lost():
    tree: Any = registry().experiment("quickstart")
    assert find_lost_settings(tree, tree) == ()
    assert find_lost_settings(tree, patch(tree, {"model.decoder.layer.attention.window": 7})) == ()
    assert find_lost_settings(tree, patch(tree, {"learner.ema_decay": 0.9, "mesh.rules": {"a": ("x",)}})) == ()


def test_many_decisions_are_shortened():
    tree: Any = registry().experiment("quickstart")
    edits = {f"{ATTENTION}.{name}.bias": True for name in ("query", "key", "value", "output")}
    before = patch(tree, {**edits, "model.z_loss": 0.5, "learner.ema_decay": 0.9})
    shortened = describe_lost(before, tree, "all", {}, registry().display_name)
    assert len(shortened) == MOST
    assert shortened[-1].subject.endswith(" and 2 more")


@node
class WithoutBias(Feature):
    """Removes the biases of layer norms. It mistakes a bias that is off for its own work."""

    def apply(self, cfg: Any) -> Any:
        norms = find(cfg, registry().component("layer-norm"))
        return patch(cfg, {f"{path}.bias": False for path in norms})


@node
class Norms(Feature):
    """Declares that it replaces norms."""

    replaces = ("model.**.norm",)


def test_a_feature_that_an_earlier_one_left_without_effect_is_refused():
    start: Any = registry().experiment("gpt2-124m")
    norms = find(start, registry().component("layer-norm"))
    other = patch(start, dict.fromkeys(norms, registry().component("rms-norm")()))
    feature, earlier = WithoutBias(), {"remat": registry().feature("remat")()}
    with pytest.raises(
        RequestError, match=r"'without-bias' changes nothing after 'remat'[\s\S]*norm.bias: setting False"
    ):
        check_not_hidden("without-bias", feature, start, other, earlier)
    check_not_hidden("without-bias", feature, start, feature.apply(start), earlier)
    check_not_hidden("without-bias", feature, start, other, {"norms": Norms()})


def test_a_feature_declares_paths():
    with pytest.raises(TypeError, match=r"Wrong.replaces is 'model'; it must be a tuple of config paths or patterns"):

        @node
        class Wrong(Feature):
            replaces = "model"

    with pytest.raises(TypeError, match=r"Option.replaces is not an option"):

        @node
        class Option(Feature):
            replaces: tuple[str, ...] = ("model",)


def test_explain_finds_the_decisions_at_a_path():
    resolved = resolve("quickstart", with_=["alibi", "optimizer:component=lion"])
    assert [d.subject for d in resolved.find_replaced(f"{ATTENTION}.position")] == [f"{ATTENTION}.position"]
    assert [d.subject for d in resolved.find_replaced("learner")] == ["learner.optimizer"]
    assert [d.subject for d in resolved.find_replaced("learner.optimizer.momentum")] == ["learner.optimizer"]
    assert len(resolved.find_replaced("")) == 2
    assert resolved.find_replaced("model.vocab_size") == []
