"""Each everyday feature on the shipped experiments, and on configs that it does not fit. Nothing here is compiled."""

from typing import Any

import pytest

from axlearn_core.config import Decoder, Node, diff, encode, find, get, node, patch
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.learn import AdamW, Cosine, Learner, ParameterRule
from axlearn_core.nn.remat import Remat
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_tools.features.ema import Ema
from axlearn_plugins_tools.features.freeze import Freeze
from axlearn_plugins_tools.features.gradient_accumulation import GradientAccumulation
from axlearn_plugins_tools.features.optimizer import UseOptimizer
from axlearn_plugins_tools.features.precision import UsePrecision
from axlearn_plugins_tools.features.remat import UseRemat
from axlearn_plugins_tools.features.remat_tags import RematTags
from axlearn_plugins_tools.features.replace import Replace
from axlearn_plugins_tools.features.scan import Scan
from axlearn_plugins_transformer.feed_forward import PlainFeedForward
from axlearn_plugins_transformer.norm import LayerNorm, RMSNorm
from axlearn_plugins_transformer.stack import Stack

NAMES = registry()
EXPERIMENTS = (
    "quickstart",
    "llama2-7b",
)  # the suites of conformance and end to end try every experiment that is installed
USES = [
    "ema", "ema:decay=0.99", "gradient-accumulation:steps=4", "freeze:pattern=decoder.embedding.**",
    'freeze:pattern=[decoder.embedding.**, "**.norm.*"]', "optimizer:component=lion",
    "optimizer:component=sgd,settings={momentum: 0.9}", "precision:param_dtype=bfloat16,dtype=float32",
    "precision:output_dtype=bfloat16", "remat", "remat:policy=none", "remat:policy=dots", "remat:save=[query, context]",
    "remat:save=[query],offload=[context]", "remat:recompute=[mlp_hidden]", "scan", "scan:on=false",
    "replace:target=rms-norm,component=layer-norm", "replace:path=model.decoder.norm,component=layer-norm,settings={bias: false}",
]  # fmt: skip


def resolved(experiment, *features):
    return resolve(experiment, with_=features).config


@pytest.mark.slow_cases("ema-quickstart")
@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("use", USES)
def test_it_resolves_and_twice_is_once(experiment, use):
    once = resolved(experiment, use)
    again = resolve(once, with_=[use])
    assert again.config == once
    assert again.features[0][1].in_effect(once)
    assert Decoder(NAMES).decode(encode(once, NAMES), Any) == once  # it goes to a file and back


def changes(experiment, *features):
    before = resolve(experiment).config
    return {c.path: (c.old, c.new) for c in diff(before, resolved(experiment, *features), NAMES.display_name)}


def test_what_each_changes_and_nothing_else():
    assert changes("quickstart", "ema:decay=0.9") == {"learner.ema_decay": (None, 0.9)}
    assert changes("quickstart", "gradient-accumulation:steps=2") == {"learner.accumulate_steps": (1, 2)}
    assert changes("quickstart", "precision:dtype=bfloat16") == {"model.dtype": ("float32", "bfloat16")}
    assert changes("quickstart", "scan") == {"model.decoder.stack.mode": ("unrolled", "scan")}
    assert changes("llama2-7b", "scan:on=false") == {"model.decoder.stack.mode": ("scan", "unrolled")}
    assert changes("llama2-7b", "remat:policy=dots") == {"model.decoder.stack.remat.save": ((), "dots")}
    assert resolved("llama2-7b", "remat:policy=none").model.decoder.stack.remat is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Remat.Config()),
        ({"policy": "full"}, Remat.Config()),
        ({"policy": "none"}, None),
        ({"policy": "everything"}, Remat.Config(save="everything")),
        ({"save": ("query",)}, Remat.Config(save=("query",))),
        ({"save": ("query",), "offload": ("key",)}, Remat.Config(save=("query",), offload=("key",))),
        ({"offload": ("key",)}, Remat.Config(offload=("key",))),
        ({"recompute": ("mlp_up",)}, RematTags.Config(recompute=("mlp_up",))),
    ],
)
def test_remat_sets_the_node_of_every_stack(options, expected):
    for before in (Stack.Config(), Stack.Config(remat=Remat.Config(save="dots"))):
        assert UseRemat(**options).apply(before) == Stack.Config(remat=expected)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("remat:policy=dots,save=[query]", "cannot be given together with policy"),
        ("remat:policy=dots,offload=[query]", "cannot be given together with policy"),
        ("remat:save=[query],offload=[query]", "cannot be both saved and offloaded"),
        ("remat:policy=ful", "'full'"),
        ("remat:save=['(']", "save: not a regular expression"),
        ("precision", "no dtype is given"),
        ("precision:dtype=int8", "'bfloat16'"),
        ("ema:decay=1.0", "less than 1"),
        ("gradient-accumulation", "needs a value"),
        ("gradient-accumulation:steps=0", "at least 1"),
        ("freeze", "needs a value"),
        ("optimizer", "needs a value"),
        ("optimizer:component=lions", "did you mean: lion"),
        ("optimizer:component=lion,settings={b3: 1}", "optimizer.settings.b3: unknown key"),
        ("replace:component=layer-norm", "no component to replace is selected"),
        ("replace:target=rms-norms,component=layer-norm", "did you mean: rms-norm"),
        (
            "replace:target=layer-norm,component=rms-norm,settings={eps: 0.125}",
            "nothing to replace: there is no layer-norm",
        ),
        ("replace:target=linear,path=model.decoder.norm,component=layer-norm", "no linear at model.decoder.norm"),
        ("replace:path=model.decoder.normm,component=layer-norm", "did you mean: model.decoder.norm"),
        ("replace:path=model.vocab_size,component=layer-norm", "there is no component to replace"),
        ("replace:target=attention,component=linear", r"drop=\[num_heads\]"),
    ],
)
def test_what_is_asked_for_wrongly(use, message):
    with pytest.raises(RequestError, match=message):
        resolved("quickstart", use)


def test_the_optimizer_keeps_the_learning_rate_and_nothing_else():
    rate = Cosine(peak=0.5)
    before = patch(
        resolve("quickstart").config, {"learner.optimizer": AdamW(learning_rate=rate, b1=0.5, weight_decay=0.3)}
    )
    lion = UseOptimizer(component="lion").apply(before).learner.optimizer
    assert type(lion) is NAMES.component("lion")
    assert (lion.learning_rate, lion.b1, lion.weight_decay) == (rate, 0.9, 0.001)
    lion_config = (
        UseOptimizer(component="lion", settings={"learning_rate": 0.25, "b1": 0.1}).apply(before).learner.optimizer
    )
    assert (lion_config.learning_rate, lion_config.b1) == (0.25, 0.1)
    same = UseOptimizer(component="adamw", settings={"b2": 0.75}).apply(before).learner.optimizer
    assert same == AdamW(learning_rate=rate, b1=0.5, b2=0.75, weight_decay=0.3)

    @node
    class WithoutRate(Node[None]):
        pass

    from_none = patch(before, {"learner.optimizer": WithoutRate()})
    assert UseOptimizer(component="adamw").apply(from_none).learner.optimizer == AdamW()


def test_freeze_adds_rules_and_keeps_those_that_are_there():
    own_rules = (ParameterRule(pattern="a.*", learning_rate_scale=0.5), ParameterRule(pattern="b", weight_decay=False))
    before = patch(resolve("quickstart").config, {"learner.rules": own_rules})
    result = Freeze(pattern=("b", "c.**")).apply(before)
    assert result.learner.rules == (
        own_rules[0],
        ParameterRule(pattern="b", weight_decay=False, freeze=True),
        ParameterRule(pattern="c.**", freeze=True),
    )
    assert Freeze(pattern=("b", "c.**")).apply(result) is result


NORMS = ("model.decoder.layer.norm", "model.decoder.norm")


def test_replace_takes_over_what_both_have_and_refuses_to_lose_the_rest():
    before = resolve("quickstart").config
    result = Replace(target="rms-norm", component="layer-norm").apply(before)
    assert find(result, LayerNorm) == {p: LayerNorm.Config(eps=1e-5) for p in NORMS}
    assert find(result, RMSNorm) == {}
    with_settings = Replace(target="rms-norm", component="layer-norm", settings={"eps": 0.25, "bias": False}).apply(
        before
    )
    assert get(with_settings, NORMS[0]) == LayerNorm.Config(eps=0.25, bias=False)
    plain = patch(before, {"model.decoder.norm.weight": False})
    with pytest.raises(ConfigError, match=r"model.decoder.norm.weight: would be lost[\s\S]*drop=\[weight\]"):
        Replace(target="rms-norm", component="layer-norm").apply(plain)
    dropped = Replace(target="rms-norm", component="layer-norm", drop=("weight",)).apply(plain)
    assert get(dropped, NORMS[1]) == LayerNorm.Config(eps=1e-5)


def test_replace_does_not_take_a_component_elsewhere_for_its_own():
    """The indexer always has a layer norm. Another feature replaced the RMS norms."""
    start = registry().experiment("deepseek-v3.2")
    use = "replace:target=rms-norm,component=layer-norm"
    other = patch(start, dict.fromkeys(find(start, registry().component("rms-norm")), registry().component("linear")()))
    with pytest.raises(RequestError, match="nothing to replace: there is no rms-norm"):
        resolve(other, with_=[use])
    replaced = resolve(start, with_=[use]).config
    assert resolve(replaced, with_=[use]).config == replaced


def test_replace_by_path_sets_what_is_given_on_a_node_of_the_class():
    before = resolve("quickstart").config
    result = Replace(path="model.decoder.norm", component="rms-norm", settings={"offset": 0.5}).apply(before)
    assert result.model.decoder.norm == RMSNorm.Config(eps=1e-5, offset=0.5)
    assert result.model.decoder.layer is before.model.decoder.layer
    both = Replace(path="**.layer.**", target="rms-norm", component="layer-norm").apply(before)
    assert find(both, LayerNorm).keys() == {NORMS[0]}


def test_replace_does_not_descend_into_what_it_placed():
    before = resolve("quickstart").config
    down = patch(before, {"model.decoder.layer.feed_forward.gate.bias": True})
    feature = Replace(target="gated-feed-forward", component="feed-forward", drop=("gate",))
    result = feature.apply(down)
    assert get(result, "model.decoder.layer.feed_forward") == PlainFeedForward.Config(
        hidden_dim=384, down=get(before, "model.decoder.layer.feed_forward.down")
    )
    inside = Replace(path="model.decoder.layer.**", component="transformer-layer")
    assert inside.apply(result) == result  # the layer fits, and nothing in it is looked at
    assert feature.apply(result) == result
    assert feature.in_effect(result)


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (UseRemat(), "remat finds nothing to set"),
        (Scan(), "scan finds nothing to set"),
        (Ema(), "no 'learner'"),
        (Freeze(pattern="a"), "no 'learner'"),
        (GradientAccumulation(steps=2), "no 'learner'"),
        (UseOptimizer(component="lion"), "no 'learner'"),
        (UsePrecision(dtype="float32"), "no 'model'"),
        (Replace(target="linear", component="rms-norm"), "there is no linear"),
    ],
)
def test_a_config_that_it_does_not_fit(feature, message):
    with pytest.raises(ConfigError, match=message):
        feature.apply(LayerNorm.Config())


def test_a_learner_of_another_kind_says_what_it_lacks():
    @node
    class Other(Node[None]):
        optimizer: Node[None] = AdamW()

    @node
    class Root(Node[None]):
        learner: Node[None] = Other()

    assert Learner.Config().ema_decay is None
    with pytest.raises(ConfigError, match=r"learner.ema_decay: ema cannot set this field: .*Other does not have it"):
        Ema().apply(Root())
    assert type(UseOptimizer(component="lion").apply(Root()).learner.optimizer) is NAMES.component("lion")
