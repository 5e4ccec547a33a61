"""The depths of multi-token prediction against plain formulas that compute one document at a time."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.config import check, node, patch, replace_config
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.nn.layer import Layer
from axlearn_core.nn.remat import Remat
from axlearn_plugins_moe.mixture_of_experts import MixtureOfExperts
from axlearn_plugins_moe.routers import SigmoidRouter
from axlearn_plugins_transformer.causal_lm import CausalLM
from axlearn_plugins_transformer.multi_token import MultiTokenCausalLM, shift
from axlearn_plugins_transformer.transformer import Decoder

EPS = 1e-6
LENGTHS = ((5, 9, 2), (12,))
"""Documents of two packed rows of 16 tokens; the second row ends with padding."""


@pytest.fixture
def config(tiny):
    """A small Llama with two depths, with edits by path."""
    edits = {"decoder.num_layers": 1, "loss_chunk": 8}
    return lambda more=None, depth=2: patch(
        replace_config(tiny(edits), CausalLM, MultiTokenCausalLM.Config(depth=depth, mtp_weight=0.5)), more or {}
    )


def packed(seed=0):
    """Rows with the documents of `LENGTHS`. Some targets do not count."""
    rng = np.random.default_rng(seed)
    tokens, weights = rng.integers(0, 64, (2, 17)), (rng.random((2, 16)) < 0.8).astype(np.float32)
    segments = np.zeros((2, 16), np.int32)
    positions = np.zeros((2, 16), np.int32)
    for row, lengths in enumerate(LENGTHS):
        begin = 0
        for number, length in enumerate(lengths, start=1):
            segments[row, begin : begin + length] = number
            positions[row, begin : begin + length] = np.arange(length)
            begin += length
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": positions, "segment_ids": segments}
    return {name: jnp.asarray(x, jnp.int32) for name, x in batch.items()} | {
        "weights": jnp.asarray(weights * (segments > 0))
    }


def rms(x, weight):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPS) * weight


def rope(x):
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
    return np.concatenate([turned.real, turned.imag], -1)


def plain_layer(w, x):
    """One document, [T, D]."""
    h = rms(x, w["attention_norm.weight"])
    q, k, v = (np.einsum("td,dnh->tnh", h, w[f"attention.{name}.weight"]) for name in ("query", "key", "value"))
    q, k, v = rope(q), np.repeat(rope(k), q.shape[1] // k.shape[1], 1), np.repeat(v, q.shape[1] // v.shape[1], 1)
    scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("nts,snh->tnh", scores / scores.sum(-1, keepdims=True), v)
    x = x + np.einsum("tnh,nhd->td", mixed, w["attention.output.weight"])
    h = rms(x, w["feed_forward_norm.weight"])
    gate, up = h @ w["feed_forward.gate.weight"], h @ w["feed_forward.up.weight"]
    return x + (gate / (1 + np.exp(-gate)) * up) @ w["feed_forward.down.weight"]


def below(params, prefix, row=None):
    parts = {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}
    return parts if row is None else {k: v[row] for k, v in parts.items()}


def plain_losses(params, batch, depth):
    """The sums of weighted cross-entropies of the model and of each depth, and the sums of their weights."""
    sums, totals = np.zeros(depth + 1), np.zeros(depth + 1)
    for row, lengths in enumerate(LENGTHS):
        begin = 0
        for length in lengths:
            tokens, targets, weights = (
                np.asarray(batch[name][row, begin : begin + length]) for name in ("tokens", "targets", "weights")
            )
            begin += length
            x = plain_layer(below(params, "decoder.layer.", 0), params["decoder.embedding.weight"][tokens])
            out = x = rms(x, params["decoder.norm.weight"])
            for k in range(min(depth + 1, length)):
                if k:
                    w = below(params, f"mtp.{k - 1}.")
                    later = params["decoder.embedding.weight"][tokens[k:]]
                    joined = [rms(later, w["embedding_norm.weight"]), rms(x[: len(later)], w["hidden_norm.weight"])]
                    x = plain_layer(below(w, "layer."), np.concatenate(joined, -1) @ w["projection.weight"])
                    out = rms(x, w["norm.weight"])
                logits = out @ params["decoder.head.weight"]
                entropy = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets[k:, None], 1)[:, 0]
                sums[k] += (entropy * weights[k:]).sum()
                totals[k] += weights[k:].sum()
    return sums, totals


def parameters(model):
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, k)): np.asarray(v.get_value(), np.float64) for k, v in state}


@pytest.mark.slow
def test_packed_documents_give_the_losses_of_separate_ones(config, build, grads):
    batch = packed()
    loss, report, gradients = grads(config(), batch)
    sums, totals = plain_losses(parameters(build(config())), batch, 2)
    assert totals[1] < totals[0]
    np.testing.assert_allclose(report["cross_entropy"], sums[0] / totals[0], rtol=1e-5)
    np.testing.assert_allclose(report["mtp_loss"], 0.5 * (sums[1] + sums[2]) / 2 / totals[0], rtol=1e-5)
    np.testing.assert_allclose(loss, report["cross_entropy"] + report["mtp_loss"], rtol=1e-6)
    for depth in (1, 2):
        np.testing.assert_allclose(float(report[f"mtp_{depth}_loss"]), sums[depth] / totals[depth], rtol=1e-5)
        assert report[f"mtp_{depth}_loss"].weight == totals[depth]
    assert all(np.abs(x).max() > 0 for x in gradients.values())
    assert any(path.startswith("mtp.1.") for path in gradients)


def test_microbatches_sum_to_the_batch(config, build, run):
    """The rows have different numbers of targets, and different shares of them have a later token."""
    model, batch = build(config()), packed()
    call = MultiTokenCausalLM.loss
    whole, report = run(model, batch, call=call)
    parts = [run(model, {k: v[i : i + 1] for k, v in batch.items()}, call=call) for i in (0, 1)]
    weights = [float(r["weight"]) for _, r in parts]
    assert weights[0] != weights[1]
    np.testing.assert_allclose(whole, np.average([float(x) for x, _ in parts], weights=weights), rtol=1e-5)
    merged = parts[0][1]["mtp_2_loss"].merged(parts[1][1]["mtp_2_loss"])
    np.testing.assert_allclose(merged.value, report["mtp_2_loss"].value, rtol=1e-5)


def test_the_held_out_loss_reports_the_depths_and_leaves_them_out(config, build, run):
    batch, call = packed(), MultiTokenCausalLM.held_out_loss
    loss, report = run(build(config()), batch, call=call)
    _, trained = run(build(config()), batch, call=MultiTokenCausalLM.loss)
    np.testing.assert_allclose(loss, trained["cross_entropy"], rtol=1e-6)
    np.testing.assert_allclose(report["mtp_loss"], trained["mtp_loss"], rtol=1e-6)


def weights_of_depths(model, batch):
    return [weights for _, _, weights in model.predictions(model.hidden_states(batch)[0], batch)]


def test_targets_without_weights_segments_and_prefixes(config, build, run):
    """Without segments, a row is one document. A prefix that attends in both directions would see its targets."""
    batch = {name: packed()[name] for name in ("tokens", "targets")}
    one, two = run(build(config()), batch, call=weights_of_depths)
    assert one.tolist() == [[1.0] * 15 + [0.0]] * 2
    assert two.tolist() == [[1.0] * 14 + [0.0] * 2] * 2
    with_prefix = batch | {"prefix": jnp.asarray([0, 4], jnp.int32)}
    one, _ = run(build(config()), with_prefix, call=weights_of_depths)
    assert one.tolist() == [[1.0] * 15 + [0.0], [0.0] * 3 + [1.0] * 12 + [0.0]]


@pytest.mark.slow
def test_rows_that_are_shorter_than_the_depth_have_no_targets(config, build, run):
    batch = {name: packed()[name][:, :2] for name in ("tokens", "targets")}
    loss, report = run(build(config(depth=3)), batch, call=MultiTokenCausalLM.loss)
    assert float(report["mtp_3_loss"]) == 0
    assert np.isfinite(loss)
    assert shift(jnp.ones((1, 2)), 3).tolist() == [[0.0, 0.0]]


@pytest.mark.slow
def test_remat_does_not_change_the_gradients(config, grads):
    batch = packed()
    loss, _, expected = grads(config(), batch)
    remat_loss, _, actual = grads(config({"decoder.stack.remat": Remat.Config(save="nothing")}), batch)
    np.testing.assert_allclose(remat_loss, loss, rtol=1e-6)
    for path, value in expected.items():
        np.testing.assert_allclose(actual[path], value, rtol=1e-4, atol=1e-6, err_msg=path)


@pytest.mark.slow
def test_experts_of_a_depth_report_summaries_and_update_their_bias(config, build):
    """The auxiliary losses of all layers are summed; the layer of the depth sees no positions without a later token."""
    experts = MixtureOfExperts.Config(
        num_experts=4, hidden_dim=16, top_k=1, router=SigmoidRouter.Config(load_balance=0.01)
    )
    model = build(config({"decoder.layer.feed_forward": experts}, depth=1))
    batch = packed()
    _, report = model.loss(batch)
    _, plain = CausalLM.losses(model, model.hidden_states(batch)[0], batch)
    assert set(plain) == {"weight"}
    assert {"expert_load_max", "mtp_1.expert_load_max"} <= set(report)
    assert float(report["load_balance"]) > 0
    router = model.mtp[0].layer.feed_forward.router
    before = np.asarray(router.bias[...])
    router.end_step()
    assert np.abs(np.asarray(router.bias[...]) - before).max() > 0


class Unembedded(Decoder):
    """A decoder that cannot embed tokens by itself."""

    @node
    class Config(Decoder.Config):
        """The same settings."""

    embed = None


class Flat(Layer):
    """A decoder without layers."""

    @node
    class Config(Layer.Config["Flat"]):
        """A width."""

        hidden_dim: int = 8


def test_decoders_without_embeddings_or_layers_are_refused(config):
    cfg = config()
    unembedded = patch(cfg, {"decoder": replace_config(cfg.decoder, Decoder, Unembedded.Config())})
    with pytest.raises(RequestError, match=r"Unembedded has no method `embed`[\s\S]*fix:"):
        nnx.eval_shape(lambda: unembedded.build(rngs=nnx.Rngs(0)))
    with pytest.raises(
        ConfigError, match=r"decoder: .*but the decoder has no 'num_layers'[\s\S]*fix: remove the feature"
    ):
        check(patch(cfg, {"decoder": Flat.Config()}))
