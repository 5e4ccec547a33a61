import re

import pytest
from click.testing import CliRunner

import axlearn_core as ax
from axlearn_core.cli.main import cli
from axlearn_core.config import Scaled, diff, find, node, patch
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.nn.linear import Linear
from axlearn_core.plugins.registry import registry
from axlearn_plugins_moe.dispatch import CapacityDispatch, DroplessDispatch
from axlearn_plugins_moe.feature import MoE
from axlearn_plugins_moe.mixture_of_experts import MixtureOfExperts
from axlearn_plugins_moe.routers import ExpertChoiceRouter, SigmoidRouter, SoftmaxRouter
from axlearn_plugins_transformer.alternate import Alternate
from axlearn_plugins_transformer.attention import Attention
from axlearn_plugins_transformer.causal_lm import CausalLM
from axlearn_plugins_transformer.feed_forward import GatedFeedForward, PlainFeedForward
from axlearn_plugins_transformer.kernels.gated_linear_unit import ClampedForm, Swish
from axlearn_plugins_transformer.norm import RMSNorm
from axlearn_plugins_transformer.transformer import Decoder, TransformerLayer

SLOT = "decoder.layer.feed_forward"
DENSE = GatedFeedForward.Config(hidden_dim=48, activation="gelu", dtype="bfloat16")
MODEL = CausalLM.Config(
    vocab_size=10,
    decoder=Decoder.Config(
        num_layers=4,
        hidden_dim=16,
        layer=TransformerLayer.Config(attention=Attention.Config(num_heads=2), feed_forward=DENSE),
    ),
)
EXPERTS = MixtureOfExperts.Config(hidden_dim=48, activation="gelu", dtype="bfloat16")


class Capped(GatedFeedForward):
    @node
    class Config(GatedFeedForward.Config):
        cap: float = 1.0


def placed(feature, model=MODEL):
    result = feature.apply(model)
    assert feature.apply(result) == result
    assert feature.in_effect(result)
    return find(result, SLOT)[SLOT]


def with_slot(value):
    return patch(MODEL, {SLOT: value})


def test_experts_take_over_what_they_replace():
    assert placed(MoE()) == EXPERTS
    assert placed(MoE(num_experts=4, top_k=1, hidden_dim=Scaled(factor=2.0))) == MixtureOfExperts.Config(
        num_experts=4, top_k=1, hidden_dim=Scaled(factor=2.0), activation="gelu", dtype="bfloat16"
    )
    plain = with_slot(PlainFeedForward.Config(activation="relu"))
    assert placed(MoE(), plain) == MixtureOfExperts.Config(hidden_dim=Scaled(factor=4.0), activation="relu", gate=None)
    biased = GatedFeedForward.Config(up=Linear.Config(bias=True))
    assert placed(MoE(shared_experts=1), with_slot(biased)).up == biased.up
    assert placed(MoE(shared_experts=1), with_slot(biased)).shared == biased
    result = MoE().apply(MODEL)
    assert result.decoder.layer.attention is MODEL.decoder.layer.attention
    assert not MoE().in_effect(MODEL)


def test_options_are_set_on_experts_that_are_there():
    before = with_slot(patch(EXPERTS, {"router": SigmoidRouter.Config(scale=2.5), "num_experts": 16}))
    assert placed(MoE(top_k=4), before) == patch(find(before, SLOT)[SLOT], {"top_k": 4})
    assert placed(MoE(), before) == find(before, SLOT)[SLOT]
    capacity = CapacityDispatch.Config(capacity_factor=2.0)
    result = placed(MoE(router=ExpertChoiceRouter.Config(), dispatch=capacity), before)
    assert (result.router, result.dispatch, result.num_experts) == (ExpertChoiceRouter.Config(), capacity, 16)


def test_shared_experts():
    result = placed(MoE(shared_experts=2))
    assert result.shared == GatedFeedForward.Config(hidden_dim=96, activation="gelu")
    with_shared = with_slot(result)
    assert placed(MoE(shared_experts=0), with_shared).shared is None
    assert placed(MoE(), with_shared).shared == result.shared
    relative = placed(MoE(shared_experts=3), with_slot(PlainFeedForward.Config()))
    assert relative.shared == PlainFeedForward.Config(hidden_dim=Scaled(factor=12.0))


def test_experts_take_the_form_of_the_layer():
    dense = GatedFeedForward.Config(hidden_dim=48, activation=Swish(beta=1.702), form=ClampedForm(limit=6.0))
    result = placed(MoE(shared_experts=1), with_slot(dense))
    assert (result.activation, result.form, result.shared) == (dense.activation, dense.form, dense)
    gated = with_slot(patch(result, {"shared_gate": Linear.Config()}))
    assert placed(MoE(shared_experts=2), gated).shared_gate == Linear.Config()
    assert placed(MoE(shared_experts=0), gated).shared_gate is None


def test_some_layers_keep_their_feed_forward():
    assert placed(MoE(every=2)) == Alternate(children=(DENSE, EXPERTS))
    result = MoE(dense_layers=1, every=3).apply(MODEL)
    assert find(result, SLOT)[SLOT] == Alternate(first=(DENSE,), children=(DENSE, DENSE, EXPERTS))
    assert placed(MoE(top_k=1), result).children[2].top_k == 1
    assert placed(MoE(every=2), result) == Alternate(first=(DENSE,), children=(DENSE, EXPERTS))
    assert placed(MoE(every=1, dense_layers=0), result) == EXPERTS
    both = with_slot(Alternate(children=(DENSE, PlainFeedForward.Config())))
    assert [type(c) for c in placed(MoE(), both).children] == [MixtureOfExperts.Config] * 2


@pytest.mark.parametrize(
    ("feature", "slot", "message"),
    [
        (MoE(every=2), EXPERTS, "every layer has experts already"),
        (MoE(dense_layers=1), EXPERTS, "every layer has experts already"),
        (MoE(every=2), Alternate(children=(DENSE, PlainFeedForward.Config())), "alternate here already"),
        (MoE(every=3), Alternate(children=(EXPERTS, DENSE)), "are mixed here"),
        (MoE(), Capped.Config(cap=2.0), "would be lost"),
        (
            MoE(shared_experts=1),
            GatedFeedForward.Config(hidden_dim=MixtureOfExperts.Config()),
            "cannot compute 1 times the size",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_path(feature, slot, message):
    with pytest.raises(ConfigError) as error:
        feature.apply(with_slot(slot))
    (problem,) = error.value.problems
    assert message in problem.message
    assert problem.path.startswith(SLOT)
    assert problem.fix


def test_a_config_without_feed_forward_is_an_error():
    with pytest.raises(ConfigError, match="moe finds no feed-forward layer"):
        MoE().apply(RMSNorm.Config())


OPEN = {"input.source.paths": ["x"], "input.tokenizer.path": "y"}


@pytest.mark.parametrize("experiment", ["quickstart", "llama2-7b", "llama2-70b", "llama3-8b"])
def test_every_dense_experiment_takes_experts(experiment):
    plain = ax.resolve(experiment).config
    result = ax.resolve(experiment, with_=["moe:num_experts=4,top_k=2"]).config
    (changed,) = {c.path.split(".feed_forward")[0] for c in diff(plain, result)}
    assert changed == "model.decoder.layer"
    dense, experts = plain.model.decoder.layer.feed_forward, result.model.decoder.layer.feed_forward
    assert experts == MixtureOfExperts.Config(num_experts=4, hidden_dim=dense.hidden_dim, down=dense.down)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (["moe:num_experts=2,top_k=4"], "a token cannot use more experts than there are"),
        (["moe:num_expert=4"], "did you mean: num_experts"),
        (["moe:router={type: sigmoid-ruoter}"], "did you mean: sigmoid-router"),
        (["moe:every=0"], "at least 1"),
    ],
)
def test_bad_options_are_errors_before_anything_is_built(request_, message):
    with pytest.raises(RequestError) as error:
        ax.resolve("quickstart", with_=request_).check()
    assert message in str(error.value)


def test_a_resolved_config_with_experts_can_be_written_and_read(tmp_path):
    options = (
        "moe:every=2,shared_experts=1,router={type: sigmoid-router, scale: 2.5},dispatch={type: capacity-dispatch}"
    )
    resolved = ax.resolve("quickstart", with_=[options]).check()
    (tmp_path / "run.yaml").write_text(resolved.to_yaml())
    assert ax.resolve(tmp_path / "run.yaml").config == resolved.config


def test_all_names_are_registered():
    names = registry()
    parts = {"mixture-of-experts": MixtureOfExperts.Config, "softmax-router": SoftmaxRouter.Config,
             "sigmoid-router": SigmoidRouter.Config, "expert-choice-router": ExpertChoiceRouter.Config,
             "dropless-dispatch": DroplessDispatch.Config, "capacity-dispatch": CapacityDispatch.Config}  # fmt: skip
    for name, cls in parts.items():
        assert names.component(name) is cls
        assert names.get_name(cls) == name
    assert names.feature("moe") is MoE


@pytest.mark.fast_cases(
    "moe:num_experts=4,top_k=5-more3-feed_forward.top_k: a token cannot use more experts than there are[\\\\s\\\\S]*fix:",
    "moe:num_experts=6-more1-got: 6 over 8 devices\\\\s*fix: ",
)
@pytest.mark.parametrize(
    ("with_", "more", "message"),
    [
        (
            "moe:num_experts=8",
            ["--set", "mesh.shape.expert=3"],
            r"\(experts\) is not divisible[\s\S]*got: 8 over 3 dev",
        ),
        ("moe:num_experts=6", ["--set", "mesh.shape.expert=-1", "--target", "cpu-8"], r"got: 6 over 8 devices\s*fix: "),
        ("moe:num_experts=8", ["--set", "mesh.shape.expert=4"], ""),
        (
            "moe:num_experts=4,top_k=5",
            [],
            r"feed_forward.top_k: a token cannot use more experts than there are[\s\S]*fix:",
        ),
    ],
)
def test_config_check_finds_experts_that_do_not_fit(with_, more, message):
    result = CliRunner().invoke(cli, ["config", "check", "quickstart", "--with", with_, *more])
    assert result.exit_code == (2 if message else 0), result.stderr
    assert re.search(message, result.stderr), result.stderr
