"""Each property holds for a tiny config, fails if a fault is planted, and names the layer or tensor of the fault."""

import attrs
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from axlearn_core.checkpoint import ShardedCheckpointer
from axlearn_core.learn import Learner
from axlearn_core.nn import randomness
from axlearn_core.nn.remat import Remat
from axlearn_plugins_models.huggingface import stream
from axlearn_plugins_transformer import stack
from axlearn_plugins_transformer.causal_lm import CausalLM
from axlearn_plugins_transformer.feed_forward import GatedFeedForward
from axlearn_plugins_transformer.kernels import attention, masks
from axlearn_plugins_transformer.kv_cache import ContiguousCache
from axlearn_plugins_verify.properties import adapters, kernels, scan
from support import proof_cases

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


@pytest.mark.fast_cases("causality", "packed-documents", "resume", "moving-average", "updates", "derivatives")
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
def test_kernels_equal_their_references():
    outcome = check("kernels", case(sizes=()))
    assert outcome.holds, outcome
    assert "xla-blocked of attention" in outcome.compared


# Faults, each planted by replacing a function.


def show_next_token(monkeypatch):
    original = masks.Causal.materialize

    def materialize(self, queries, keys, query_slots=None, key_slots=None):
        queries = (queries[0] + 1, queries[1] + 1) if query_slots is None else queries
        return original(self, queries, keys, query_slots, key_slots)

    monkeypatch.setattr(masks.Causal, "materialize", materialize)
    monkeypatch.setattr(masks.Causal, "block", lambda *_: None)


def show_all_documents(monkeypatch):
    monkeypatch.setattr(masks.visible, "__defaults__", masks.visible.__defaults__)
    monkeypatch.setattr(masks.Segments, "materialize", lambda *_: jnp.ones((1, 1, 1), bool))


def count_padding(monkeypatch):
    original = CausalLM.loss

    def loss(self, batch):
        value, report = original(self, batch)
        return value + 0.01 * jnp.mean(batch["tokens"].astype(jnp.float32)), report

    monkeypatch.setattr(CausalLM, "loss", loss)


def scale_scanned_layers(monkeypatch):
    original = stack._layer

    def layer(graphs, context, remat, shared, kind, in_loop=False):
        run = original(graphs, context, remat, shared, kind, in_loop)
        return (lambda x, *args: run(1.01 * x, *args)) if in_loop else run

    monkeypatch.setattr(stack, "_layer", layer)


def stop_gradients_of_remat(monkeypatch):
    monkeypatch.setattr(
        Remat, "wrap", lambda self, function, in_loop: lambda x, *args: function(jax.lax.stop_gradient(x), *args)
    )


def overwrite_cache(monkeypatch):
    original = ContiguousCache.append
    monkeypatch.setattr(
        ContiguousCache, "append", lambda self, cache, key, value, slots: original(self, cache, key, value, slots * 0)
    )


def stop_gradients_of_layer(monkeypatch):
    original = GatedFeedForward.__call__
    monkeypatch.setattr(GatedFeedForward, "__call__", lambda self, x: jax.lax.stop_gradient(original(self, x)))


def keep_final_norm(monkeypatch):
    original, path = Learner.update, "decoder.norm.weight"

    def update(self, grads, state, params, loss):
        new, *rest = original(self, grads, state, params, loss)
        return {**new, path: params[path]}, *rest

    monkeypatch.setattr(Learner, "update", update)


def drop_z_loss(monkeypatch):
    original = CausalLM._options
    monkeypatch.setattr(CausalLM, "_options", lambda self, z_loss=0.0: original(self))


def average_slowly(monkeypatch):
    original = Learner._update_average
    monkeypatch.setattr(
        Learner, "_update_average", lambda self, average, new: original(self, average, original(self, average, new))
    )


def merge_without_scale(monkeypatch):
    original = adapters.merge
    monkeypatch.setattr(adapters, "merge", lambda params, scales: original(params, dict.fromkeys(scales, 1.0)))


def round_export(monkeypatch):
    original = stream.values
    monkeypatch.setattr(stream, "values", lambda *args: (x.astype("float16").astype(x.dtype) for x in original(*args)))


def repeat_step(monkeypatch):
    original = ShardedCheckpointer.restore

    def restore(self, step, like):
        state, extra = original(self, step, like)
        return state.replace(step=state.step - 1), extra

    monkeypatch.setattr(ShardedCheckpointer, "restore", restore)


def drop_soft_cap(monkeypatch):
    original = attention._XLABlocked.__call__
    monkeypatch.setattr(
        attention._XLABlocked, "__call__", lambda self, op: original(self, attrs.evolve(op, softcap=None))
    )


def share_masks(monkeypatch):
    original = randomness.split_leading

    def split(array, sizes):
        parts = original(array, sizes)
        return [parts[0]] * len(parts) if randomness.is_key(array) else parts

    monkeypatch.setattr("axlearn_plugins_transformer.stack_layers.randomness.split_leading", split)


FAULTS = [
    ("causality", show_next_token, (), (), "decoder.layer.0.attention input of output"),
    ("packed-documents", show_all_documents, (), (), "decoder.layer.0.attention input of output"),
    ("padding", count_padding, (), (), " loss"),
    ("scan", scale_scanned_layers, (), (), "decoder input of layer.0"),
    ("scan", share_masks, ("dropout:rate=0.1",), (), "decoder.layer.1.attention_dropout output"),
    ("remat", stop_gradients_of_remat, (), (), "gradient of decoder"),
    ("decode", overwrite_cache, (), (), "decoder.layer.0.attention input of output"),
    ("derivatives", stop_gradients_of_layer, (), (), "decoder.layer.1.feed_forward"),
    ("updates", keep_final_norm, (), (), "decoder.norm decoder.norm.weight"),
    ("settings", drop_z_loss, (), ("model.z_loss=0.01",), " z_loss"),
    ("moving-average", average_slowly, ("ema",), (), "average of "),
    ("merged-adapters", merge_without_scale, ("lora:rank=2,alpha=8",), (), "decoder.layer.0"),
    ("export", round_export, (), (), "decoder"),
    ("resume", repeat_step, (), (), " step"),
    ("kernels", drop_soft_cap, (), ("model.decoder.layer.attention.softcap=1.0",), "decoder.layer.0.attention"),
]


@pytest.mark.fast_cases("causality*", "resume*")
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


@pytest.mark.parametrize(("experiment", "layers"), [("gemma2-2b", 4), ("deepseek-v2-lite", 4), ("quickstart", 2)])
def test_alternating_layers_are_scanned_for_two_periods(experiment, layers):
    small = proof_cases.case(experiment)
    assert small.config.model.decoder.num_layers == 2
    assert scan.with_periods(small.config, small.original).model.decoder.num_layers == layers
    same = scan.with_periods(small.config, small.config)
    assert same.model.decoder.num_layers == 2, "the original has no more layers"


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
