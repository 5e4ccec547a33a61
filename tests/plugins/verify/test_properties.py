"""Each property holds for a tiny config, fails if a fault is planted, and names the layer or tensor of the fault."""

import jax.numpy as jnp
import pytest
from flax import nnx

from axlearn_core.config import patch
from axlearn_plugins_verify.properties import kernels
from support import mask_layers, proof_cases, property_faults, toy_models

SMALL = ("model.decoder.hidden_dim=16", "input.sequence_length=8", "input.batch_size=4")


def case(*features, settings=(), sizes=SMALL):
    return proof_cases.case("quickstart", features, (*sizes, *settings))


@pytest.fixture(scope="module")
def sound():
    """A config without faults. The properties share its programs."""
    return case("ema", settings=["model.z_loss=0.01"])


def check(name, proof_case):
    checked = proof_cases.load_property(name)
    assert checked.skip_reason(proof_case) is None
    return checked.check(proof_case)


def skip_reason(name, proof_case):
    return proof_cases.load_property(name).skip_reason(proof_case)


SHARED = (
    "causality", "decode", "derivatives", "export", "microbatches", "moving-average", "packed-documents", "padding", "remat",
    "resume", "scan", "settings", "updates",
)  # fmt: skip


@pytest.mark.fast_cases("causality", "packed-documents")
@pytest.mark.parametrize("name", SHARED)
def test_a_property_holds_for_a_sound_config(name, sound):
    outcome = check(name, sound)
    assert outcome.holds, outcome
    assert outcome.compared


@pytest.mark.parametrize(("name", "feature"), [("merged-adapters", "lora:rank=2"), ("mesh", "remat")])
@pytest.mark.slow
def test_a_property_holds_for_a_feature(name, feature):
    assert check(name, case(feature, settings=["mesh.shape={data: 2}"])).holds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causality", "decode"])
@pytest.mark.parametrize("mask", ["prefix", "chunks", "selected"])
def test_masks_that_are_not_only_causal_are_not_faults(name, mask):
    plain = case().config
    masked = proof_cases.ProofCase(patch(plain, {"model": mask_layers.config(plain.model, mask)}))
    assert check(name, masked).holds


def test_a_prefix_of_all_tokens_has_no_later_ones():
    plain = case(settings=["input.sequence_length=4"], sizes=("model.decoder.hidden_dim=16",)).config
    masked = proof_cases.ProofCase(patch(plain, {"model": mask_layers.config(plain.model, "prefix")}))
    assert skip_reason("causality", masked) == "all 4 tokens of a row are in the prefix of 5 tokens"


@pytest.mark.parametrize(
    ("feature", "settings", "reason"),
    [
        ("cispo", (), "the gradients of objective.clip treat the limited ratios as constants"),
        ("kto", (), "the gradients of objective treat the estimates of the KL divergence as constants"),
        ("ppo", (), "the gradients of objective.critic treat the advantages and the returns as constants"),
        ("grpo", (), None),
        (
            "grpo",
            ("objective.ratio.base=current",),
            "the gradients of objective.ratio treat the log-probabilities that the ratios compare with as constants",
        ),
        ("dpo", (), None),
    ],
)
def test_gradients_with_constant_terms_are_not_derivatives(feature, settings, reason):
    assert skip_reason("derivatives", case(*toy_models.use(feature), settings=settings)) == reason


@pytest.mark.slow
def test_kernels_equal_their_references():
    outcome = check("kernels", case(sizes=()))
    assert outcome.holds, outcome
    assert "xla-blocked of attention" in outcome.compared


FAULTS = [
    ("causality", property_faults.show_next_token, (), (), "decoder.layer.0.attention input of output"),
    ("packed-documents", property_faults.show_all_documents, (), (), "decoder.layer.0.attention input of output"),
    ("padding", property_faults.count_padding, (), (), " loss"),
    ("scan", property_faults.scale_scanned_layers, (), (), "decoder input of layer.0"),
    ("scan", property_faults.share_masks, ("dropout:rate=0.1",), (), "decoder.layer.1.attention_dropout output"),
    ("remat", property_faults.stop_gradients_of_remat, (), (), "gradient of decoder"),
    ("decode", property_faults.overwrite_cache, (), (), "decoder.layer.0.attention input of output"),
    ("derivatives", property_faults.stop_gradients_of_layer, (), (), "decoder.layer.1.feed_forward"),
    ("updates", property_faults.keep_final_norm, (), (), "decoder.norm decoder.norm.weight"),
    ("settings", property_faults.drop_z_loss, (), ("model.z_loss=0.01",), " z_loss"),
    ("moving-average", property_faults.average_slowly, ("ema",), (), "average of "),
    ("merged-adapters", property_faults.merge_without_scale, ("lora:rank=2,alpha=8",), (), "decoder.layer.0"),
    ("export", property_faults.round_export, (), (), "decoder"),
    ("resume", property_faults.repeat_step, (), (), " step"),
    (
        "kernels",
        property_faults.drop_soft_cap,
        (),
        ("model.decoder.layer.attention.softcap=1.0",),
        "decoder.layer.0.attention",
    ),
]


@pytest.mark.fast_cases("causality*")
@pytest.mark.parametrize(
    ("name", "plant", "features", "settings", "place"), FAULTS, ids=[f"{f[0]}-{f[1].__name__}" for f in FAULTS]
)
def test_a_property_finds_a_fault(name, plant, features, settings, place, monkeypatch):
    plant(monkeypatch)
    sizes = () if name == "kernels" else SMALL  # kernels need the rows of the original
    outcome = check(name, case(*features, settings=settings, sizes=sizes))
    assert not outcome.holds, outcome
    assert place in f"{outcome.difference.layer} {outcome.difference.tensor}", outcome


@pytest.mark.parametrize(
    ("name", "features", "settings", "reason"),
    [
        ("causality", (), ("model.decoder.layer.attention.causal=false",), "bidirectional: model.decoder.layer"),
        ("decode", (), ("model.decoder.layer.attention.causal=false",), "bidirectional"),
        ("merged-adapters", (), (), "no adapters"),
        ("moving-average", (), (), "no moving average"),
        ("packed-documents", ("moe:dispatch={type: capacity-dispatch}",), (), "CapacityDispatch lets the tokens"),
        ("export", ("dropout:rate=0.1",), (), "no family describes this whole model"),
    ],
)
def test_a_property_that_does_not_apply_says_why(name, features, settings, reason):
    assert reason in skip_reason(name, case(*features, settings=settings))


def test_longer_rows_are_one_document():
    batch = proof_cases.case("quickstart", (), SMALL).batch()
    batch["positions"] = batch["segment_ids"] = jnp.zeros_like(batch["tokens"])
    longer = kernels.lengthened(batch, 3 * batch["tokens"].shape[1] - 1)
    assert {x.shape for x in longer.values()} == {(kernels.ROWS, 47)}
    assert longer["positions"][0].tolist() == list(range(47))
    assert (longer["segment_ids"] == 1).all()


class Bidirectional(nnx.Module):
    """A model that is not a language model."""


def test_models_without_logits_are_skipped(monkeypatch):
    proof_case = case()
    monkeypatch.setattr(type(proof_case.program().functional), "describe", lambda _: Bidirectional())
    for name in ("causality", "decode", "packed-documents"):
        assert "not a language model" in skip_reason(name, proof_case)
