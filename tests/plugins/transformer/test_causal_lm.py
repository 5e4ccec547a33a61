import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from axlearn_core.config import replace_config
from axlearn_core.errors import RequestError
from axlearn_core.nn import summaries
from axlearn_core.nn.layer import Context
from axlearn_core.nn.remat import Remat
from axlearn_core.nn.sharding import constrain, logical_rules
from axlearn_plugins_rope.rotary import RotaryEmbedding
from axlearn_plugins_transformer.alternate import Alternate
from axlearn_plugins_transformer.causal_lm import CausalLM, batch_context, num_params
from axlearn_plugins_transformer.embedding import Embedding
from axlearn_plugins_transformer.norm import LayerNorm, RMSNorm
from axlearn_plugins_transformer.transformer import TransformerLayer
from support import extended_models

QUICK = {"xla_backend_optimization_level": 0}


def assert_trees_close(a, b, tolerance=1e-5):
    assert a.keys() == b.keys()
    for name in a:
        scale = float(jnp.abs(b[name]).max()) or 1.0
        np.testing.assert_allclose(a[name], b[name], rtol=tolerance, atol=tolerance * scale, err_msg=name)


def _loss(model, batch):
    return model.loss(batch)


def _prefixed(model, tokens, prefix):
    return model.decoder(tokens, Context(prefix=prefix))[0]


def llama_loss(p, batch, layers=2, heads=4, kv=2, eps=1e-6, embed=1.0, residual=1.0, output=1.0, rotary=(8, 8)):
    """Compute the model of the `tiny` config with plain formulas.

    `rotary` is the number of rotated elements in each head, by layer. The other numbers are the multipliers of Granite.
    """

    def rms(x, w):
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + eps) * w[None, None]

    def rope(x, size):
        x, rest, half = x[..., :size], x[..., size:], size // 2
        angle = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)[None]
        turn = jnp.exp(1j * angle)[None, :, None]
        y = (x[..., :half] + 1j * x[..., half:]) * turn
        return jnp.concatenate([y.real, y.imag, rest], -1)

    x = p["decoder.embedding.weight"][batch["tokens"]] * embed
    for i in range(layers):
        kinds = len(set(rotary))  # the layers of each kind are stacked
        prefix, row = ("decoder.layer.", i) if kinds == 1 else (f"decoder.layer.{i}.", 0)
        w = {k.removeprefix(prefix): v[row] for k, v in p.items() if k.startswith(prefix)}
        h = rms(x, w["attention_norm.weight"])
        q, k, v = (jnp.einsum("bsd,dnh->bsnh", h, w[f"attention.{n}.weight"]) for n in ("query", "key", "value"))
        q, k = rope(q, rotary[i]), jnp.repeat(rope(k, rotary[i]), heads // kv, 2)
        s = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(q.shape[-1])
        s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool))[None, None], s, -jnp.inf)
        o = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), jnp.repeat(v, heads // kv, 2))
        x = x + residual * jnp.einsum("bsnh,nhd->bsd", o, w["attention.output.weight"])
        h = rms(x, w["feed_forward_norm.weight"])
        gate, up = h @ w["feed_forward.gate.weight"], h @ w["feed_forward.up.weight"]
        x = x + residual * (gate * jax.nn.sigmoid(gate) * up) @ w["feed_forward.down.weight"]
    logits = output * rms(x, p["decoder.norm.weight"]) @ p["decoder.head.weight"]
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)
    return -jnp.mean(log_probs)


def parameters(model):
    state = nnx.state(model)
    return {".".join(map(str, k)): v.get_value() for k, v in nnx.to_flat_state(state)}


def test_loss_and_gradients_match_the_plain_formulas(tiny, build, batch, grads):
    loss, report, actual = grads(tiny(), batch)
    expected, expected_grads = jax.jit(jax.value_and_grad(llama_loss), compiler_options=QUICK)(
        parameters(build(tiny())), batch
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert_trees_close(actual, expected_grads, 2e-5)
    assert report == {"weight": batch["targets"].size}


@pytest.mark.slow
def test_multipliers_and_layers_without_positions(tiny, build, batch, grads, run):
    """The multipliers of Granite, with partial rotary embeddings in layer 0, and no position encoding in layer 1."""
    positions = Alternate(children=(RotaryEmbedding.Config(fraction=0.5), None))
    multipliers = {"embedding.multiplier": 12.0, "layer.residual_multiplier": 0.25, "output_multiplier": 0.5}
    cfg = tiny({f"decoder.{k}": v for k, v in {"layer.attention.position": positions, **multipliers}.items()})
    loss, _, actual = grads(cfg, batch)
    plain = functools.partial(llama_loss, embed=12.0, residual=0.25, output=0.5, rotary=(4, 0))
    expected, expected_grads = jax.jit(jax.value_and_grad(plain), compiler_options=QUICK)(parameters(build(cfg)), batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert_trees_close(actual, expected_grads, 2e-5)
    logits = run(build(cfg), batch["tokens"])  # not computed by the loss
    entropy = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)
    np.testing.assert_allclose(jnp.mean(entropy), expected, rtol=1e-5)


REMATS = {
    "none": None,
    "nothing": Remat.Config(save="nothing"),
    "tags": Remat.Config(save=("query", "key", "value", "context", "attention_out", "mlp_gate", "mlp_up", "mlp_out")),
    "dots": Remat.Config(save="dots"),
    "everything": Remat.Config(save="everything"),
}


QUICK_WAYS = {("unrolled", "none"), ("scan", "tags"), ("unrolled", "nothing")}
WAYS = [
    pytest.param(mode, remat, id=f"{mode}-{remat}", marks=() if (mode, remat) in QUICK_WAYS else pytest.mark.slow)
    for mode in ("scan", "unrolled")
    for remat in REMATS
]


@pytest.mark.fast_cases("unrolled-none")
@pytest.mark.parametrize(("mode", "remat"), WAYS)
def test_how_the_stack_runs_changes_no_number(tiny, batch, grads, mode, remat):
    loss, _, expected = grads(tiny(), batch)
    found_loss, _, actual = grads(tiny({"decoder.stack.mode": mode, "decoder.stack.remat": REMATS[remat]}), batch)
    np.testing.assert_allclose(found_loss, loss, rtol=1e-6)
    assert_trees_close(actual, expected)


@pytest.mark.slow
def test_remat_recomputes_what_it_does_not_save(tiny, build, batch):
    def flops(remat):
        cfg = tiny({"decoder.stack.mode": "unrolled", "decoder.stack.remat": remat})
        graph, state = nnx.split(build(cfg))
        step = jax.jit(jax.grad(lambda s: nnx.merge(graph, s).loss(batch)[0]), compiler_options=QUICK)
        return step.lower(state).compile().cost_analysis()["flops"]

    assert flops(Remat.Config(save="nothing")) > flops(REMATS["tags"]) > 0.999 * flops(None)
    assert flops(Remat.Config(save="nothing")) > 1.15 * flops(None)


def test_a_tag_that_no_layer_has_is_an_error(tiny, batch, grads):
    with pytest.raises(
        RequestError, match=r"unknown activation tag in remat 'contxt'\n.*did you mean: context"
    ) as error:
        grads(tiny({"decoder.stack.remat": Remat.Config(save=("query", "contxt"))}), batch)
    assert "context, key, mlp_gate" in str(error.value)


@pytest.mark.slow
def test_a_tag_of_a_kernel_of_another_machine_keeps_nothing_here(tiny, batch, grads, monkeypatch):
    with_tag = tiny({"decoder.stack.remat": Remat.Config(save=("query", "my_kernel_.*"))})
    with pytest.raises(RequestError, match=r"unknown activation tag in remat 'my_kernel_"):
        grads(with_tag, batch)
    monkeypatch.setattr("axlearn_core.nn.remat.kernel_tags", lambda: {"my_kernel_sums"})
    expected = grads(tiny({"decoder.stack.remat": Remat.Config(save=("query",))}), batch)
    jax.tree.map(np.testing.assert_array_equal, grads(with_tag, batch), expected)


def test_packed_rows_equal_separate_rows(tiny, build, run):
    model = build(tiny())
    a, b = (jax.random.randint(jax.random.key(i), (1, n), 0, 64) for i, n in ((1, 11), (2, 20)))
    padding = jnp.zeros((1, 5), jnp.int32)
    row = jnp.concatenate([a, b, padding], 1)
    ids = jnp.asarray([[1] * 11 + [2] * 20 + [0] * 5])
    positions = jnp.concatenate([jnp.arange(11), jnp.arange(20), jnp.arange(5)])[None]
    packed = run(model, row, positions=positions, segment_ids=ids)
    np.testing.assert_allclose(packed[:, :11], run(model, a), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(packed[:, 11:31], run(model, b), rtol=1e-4, atol=1e-5)

    def loss(batch):
        return run(model, batch, call=_loss)

    losses = [loss({"tokens": t[:, :-1], "targets": t[:, 1:]}) for t in (a, b)]
    targets = jnp.concatenate([row[:, 1:], padding[:, :1]], 1)
    weights = jnp.asarray([[1.0] * 10 + [0.0] + [1.0] * 19 + [0.0] * 6])
    together, report = loss(
        {"tokens": row, "targets": targets, "weights": weights, "segment_ids": ids, "positions": positions}
    )
    assert report["weight"] == 29
    np.testing.assert_allclose(together, (losses[0][0] * 10 + losses[1][0] * 19) / 29, rtol=1e-5)


def test_a_batch_without_any_weight_has_loss_zero_and_no_gradient(tiny, batch, grads):
    loss, report, actual = grads(tiny(), {**batch, "weights": jnp.zeros((2, 48))})
    assert loss == 0
    assert report["weight"] == 0
    assert all((v == 0).all() for v in actual.values())


def test_a_prefix_is_seen_by_all(tiny, build, run, batch):
    model = build(tiny({"decoder.num_layers": 1}))

    def hidden(tokens, prefix):
        return run(model, tokens, jnp.asarray(prefix), call=_prefixed)

    other = batch["tokens"].at[:, 9].set(1)
    before, after = hidden(batch["tokens"], [10, 9]), hidden(other, [10, 9])
    assert not jnp.allclose(before[0, :9], after[0, :9], atol=1e-4)
    np.testing.assert_array_equal(before[1, :9], after[1, :9])


@pytest.mark.slow
def test_z_loss_and_soft_cap(tiny, build, run, batch, grads):
    cfg = tiny({"z_loss": 0.01, "logit_softcap": 2.0})
    loss, report, _ = grads(cfg, batch)
    logits = run(build(cfg), batch["tokens"])
    assert float(jnp.abs(logits).max()) < 2.0
    log_z = jax.nn.logsumexp(logits, -1)
    entropy = jnp.mean(log_z - jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0])
    np.testing.assert_allclose(report["cross_entropy"], entropy, rtol=1e-5)
    np.testing.assert_allclose(loss, entropy + 0.01 * jnp.mean(log_z**2), rtol=1e-5)


@pytest.mark.slow
def test_a_tied_head_is_the_embedding(tiny, build, batch, grads):
    cfg = tiny({"decoder.head": None, "decoder.embedding": Embedding.Config(scale=True)})
    untied = tiny({"decoder.embedding": Embedding.Config(scale=True)})
    state = nnx.state(build(untied))
    flat = dict(nnx.to_flat_state(state))
    table = flat["decoder", "embedding", "weight"]
    flat["decoder", "head", "weight"] = flat["decoder", "head", "weight"].replace(table.get_value().T)
    _, _, apart = grads(untied, batch, nnx.from_flat_state(list(flat.items())))
    flat.pop(("decoder", "head", "weight"))
    _, _, tied = grads(cfg, batch, nnx.from_flat_state(list(flat.items())))
    expected = apart["decoder.embedding.weight"] + apart["decoder.head.weight"].T
    np.testing.assert_allclose(tied["decoder.embedding.weight"], expected, rtol=1e-4, atol=1e-6)


class Reporting(TransformerLayer):
    """Adds a loss and a summary, as a mixture of experts would."""

    def __call__(self, x, context, cache=None):
        x, cache = super().__call__(x, context, cache)
        summaries.add_loss("size", 0.01 * jnp.mean(x**2))
        summaries.add_summary("largest", jnp.max(jnp.abs(x)))
        return x, cache


@pytest.mark.fast_cases("unrolled-None")
@pytest.mark.parametrize(
    ("mode", "remat"),
    [
        ("scan", Remat.Config(save="nothing")),
        ("unrolled", None),
        pytest.param("scan", None, marks=pytest.mark.slow),
        pytest.param("unrolled", Remat.Config(save="nothing"), marks=pytest.mark.slow),
    ],
)
def test_losses_and_summaries_of_layers_reach_the_root(tiny, build, run, batch, grads, mode, remat):
    layer = tiny().decoder.layer
    reporting = Reporting.Config(attention=layer.attention, feed_forward=layer.feed_forward)
    edits = {"decoder.layer": reporting, "decoder.stack.mode": mode, "decoder.stack.remat": remat}
    loss, report, actual = grads(tiny(edits), batch)
    plain, _, expected = grads(tiny(), batch)

    def outputs(model, tokens):
        xs = [model.decoder.embedding(tokens)]
        for one in model.unstacked().decoder.layer:
            xs.append(one(xs[-1], Context())[0])
        return xs[1:]

    xs = run(build(tiny()), batch["tokens"], call=outputs)
    np.testing.assert_allclose(report["size"], sum(0.01 * jnp.mean(x**2) for x in xs), rtol=1e-5)
    np.testing.assert_allclose(report["largest"], np.mean([jnp.abs(x).max() for x in xs]), rtol=1e-5)
    np.testing.assert_allclose(report["cross_entropy"], plain, rtol=1e-6)
    np.testing.assert_allclose(loss, plain + report["size"], rtol=1e-6)
    assert not np.allclose(actual["decoder.embedding.weight"], expected["decoder.embedding.weight"])


def test_summaries_are_checked_only_if_something_collects_them():
    summaries.add_loss("a", jnp.ones(()))
    with summaries.collect() as collector:
        summaries.add_loss("a", jnp.ones(()))
        summaries.add_loss("a", jnp.ones(()))
        summaries.add_summary("b", jnp.ones(()))
        with pytest.raises(RequestError, match="two layers add the summary 'b'"):
            summaries.add_summary("b", jnp.ones(()))
        with pytest.raises(RequestError, match=r"has shape \(2,\)"):
            summaries.add_loss("c", jnp.ones(2))
    assert collector.losses == {"a": 2.0}


VARIANTS = {
    "llama": {},
    "tied": {"decoder.head": None},
    "layer norm": {"decoder.layer.norm": LayerNorm.Config(), "decoder.norm": LayerNorm.Config()},
    "post norm, qk norm": {
        "decoder.layer.post_norm": RMSNorm.Config(),
        "decoder.layer.attention.qk_norm": RMSNorm.Config(),
        "decoder.layer.attention.query.bias": True,
    },
}


@pytest.mark.parametrize("edits", VARIANTS.values(), ids=VARIANTS)
def test_every_parameter_has_a_logical_name_for_each_axis(tiny, edits):
    logical_axes = {"embed", "mlp", "heads", "kv", "head_dim", "vocab", "layers", "norm"}
    state = nnx.state(nnx.eval_shape(lambda: tiny(edits).build(rngs=nnx.Rngs(0))))
    for path, variable in nnx.to_flat_state(state):
        assert isinstance(variable, nnx.Param)
        axes = variable.get_metadata()["out_sharding"]
        assert len(axes) == len(variable.get_value().shape), path
        assert set(axes) <= logical_axes, path
        assert (axes[0] == "layers") == ("layer" in path)


def test_models_build_under_jit_and_eval_shape(tiny):
    def make():
        return nnx.split(tiny().build(rngs=nnx.Rngs(0)))[1]

    result, abstract = jax.jit(make, compiler_options=QUICK)(), jax.eval_shape(make)
    assert jax.tree.structure(result) == jax.tree.structure(abstract)
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(abstract), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    weight = result["decoder"]["layer"]["attention"]["query"]["weight"].get_value()
    assert not np.allclose(weight[0], weight[1])  # layers are initialized differently


def test_parameter_counts_of_published_models(tiny):
    llama = {"vocab_size": 32000, "decoder.layer.attention.num_kv_heads": 8}
    small = llama | {
        "decoder.num_layers": 32, "decoder.hidden_dim": 4096, "decoder.layer.feed_forward.hidden_dim": 11008,
        "decoder.layer.attention.num_heads": 32, "decoder.layer.attention.num_kv_heads": 32,
    }  # fmt: skip
    assert num_params(tiny(small)) == 6_738_415_616
    large = llama | {
        "decoder.num_layers": 80, "decoder.hidden_dim": 8192, "decoder.layer.feed_forward.hidden_dim": 28672,
        "decoder.layer.attention.num_heads": 64,
    }  # fmt: skip
    assert num_params(tiny(large)) == 68_976_648_192


@pytest.mark.parametrize("mode", ["scan", pytest.param("unrolled", marks=pytest.mark.slow)])
def test_bfloat16_keeps_float32_parameters_and_loss(tiny, build, batch, grads, mode):
    cfg = tiny({"dtype": "bfloat16", "decoder.stack.mode": mode})
    with jax.numpy_dtype_promotion("strict"):
        loss, _, actual = grads(cfg, batch)
        model = build(cfg)
        assert jax.eval_shape(lambda t: model.decoder(t, Context())[0], batch["tokens"]).dtype == jnp.bfloat16
        assert jax.eval_shape(model, batch["tokens"]).dtype == jnp.float32
    assert loss.dtype == jnp.float32
    assert {v.dtype for v in actual.values()} == {jnp.dtype("float32")}
    expected, _, _ = grads(tiny(), batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-2)
    half = build(tiny({"output_dtype": "bfloat16"}))
    assert jax.eval_shape(half, batch["tokens"]).dtype == jnp.bfloat16


@pytest.mark.slow
def test_equal_shapes_compile_once(tiny, build, batch):
    graph, state = nnx.split(build(tiny()))
    step = jax.jit(lambda s, b: nnx.merge(graph, s).loss(b)[0], compiler_options=QUICK)
    for seed in range(3):
        _, state = nnx.split(build(tiny(), seed))
        step(state, batch)
    assert step._cache_size() == 1
    assert hash(nnx.split(nnx.eval_shape(lambda: tiny().build(rngs=nnx.Rngs(5))))[0]) == hash(graph)


RULES = {
    "batch": ("data", "fsdp"), "activation_heads": ("tensor",), "activation_kv": ("tensor",), "activation_mlp": ("tensor",),
    "activation_vocab": ("tensor",), "embed": ("fsdp",), "mlp": ("tensor",), "heads": ("tensor",), "kv": ("tensor",),
    "vocab": ("tensor",),
}  # fmt: skip


@pytest.mark.slow  # the default suite has `tests/e2e/test_mesh_invariance.py`
@pytest.mark.parametrize("mode", ["scan", "unrolled"])
def test_a_mesh_of_eight_devices_computes_the_same(tiny, build, grads, mode):
    tokens = jax.random.randint(jax.random.key(3), (4, 33), 0, 64)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    cfg = tiny({"decoder.stack.mode": mode})
    loss, _, expected = grads(cfg, batch)
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    graph, state = nnx.split(build(cfg))
    flat = [
        (k, v.replace(jax.device_put(v.get_value(), NamedSharding(mesh, PartitionSpec(*(
            RULES.get(a) for a in v.get_metadata()["out_sharding"]))))))
        for k, v in nnx.to_flat_state(state)
    ]  # fmt: skip
    placed = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
    step = jax.jit(jax.value_and_grad(lambda s, b: nnx.merge(graph, s).loss(b), has_aux=True), compiler_options=QUICK)
    with logical_rules(mesh, RULES):
        (found_loss, _), actual = step(nnx.from_flat_state(flat), placed)
    np.testing.assert_allclose(found_loss, loss, rtol=1e-5)
    assert_trees_close({".".join(map(str, k)): v.get_value() for k, v in nnx.to_flat_state(actual)}, expected, 2e-5)


def test_constraints_follow_the_rules_and_vanish_on_one_device():
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    one = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])

    def run(x):
        return constrain(x, "batch", "activation_mlp")

    for rules in (None, logical_rules(one, RULES)):
        with rules or summaries.collect():
            assert not jax.make_jaxpr(lambda x: run(x))(jnp.zeros((8, 6))).eqns
    with logical_rules(mesh, RULES):
        assert jax.jit(run)(jnp.zeros((8, 6))).sharding.spec == PartitionSpec(("data", "fsdp"), "tensor")
        assert jax.jit(run)(jnp.zeros((6, 6))).sharding.spec == PartitionSpec(None, "tensor")  # 4 do not divide 6


def captioner(tiny, build):
    model = build(replace_config(tiny(), CausalLM, extended_models.Captioner.Config()))
    images = jax.random.normal(jax.random.key(3), (2, extended_models.FEATURES))
    tokens = jax.random.randint(jax.random.key(4), (2, 12), 3, 64).at[:, 2].set(extended_models.IMAGE)
    return model, {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1), "images": images}


def test_inputs_and_losses_of_a_subclass_reach_training_and_evaluation(tiny, build, run):
    model, batch = captioner(tiny, build)
    loss, report = run(model, batch, call=_loss)
    assert {"second_token", "cross_entropy"} <= report.keys()
    np.testing.assert_allclose(loss, report["cross_entropy"] + report["second_token"], rtol=1e-6)
    held_out, measured = run(model, batch, call=lambda m, b: m.held_out_loss(b))
    np.testing.assert_allclose(held_out, report["cross_entropy"], rtol=1e-6)
    np.testing.assert_allclose(measured["second_token"], report["second_token"], rtol=1e-6)
    other, _ = run(model, {**batch, "images": -batch["images"]}, call=_loss)
    assert abs(float(other - loss)) > 1e-3


@pytest.mark.slow
def test_per_layer_inputs_and_shared_caches_decode_as_the_whole_row(tiny, build, run, batch):
    model = build(extended_models.extended(tiny({"decoder.num_layers": 3})))
    tokens = batch["tokens"][:, :8]
    expected = run(model, tokens)
    separate = model.unstacked()
    cache = separate.init_cache(2, 16)
    assert [len(jax.tree.leaves(layer)) for layer in cache.layers] == [2, 0, 0]
    first, cache = run(separate, tokens[:, :5], cache=cache)
    hidden, cache = run(separate, tokens[:, 5:], cache, call=lambda m, t, c: m.decoder.begin(t, Context(), c))
    last = run(separate, hidden, call=lambda m, x: m.logits(m.decoder.finish(x)))
    np.testing.assert_allclose(jnp.concatenate([first, last], 1), expected, rtol=1e-4, atol=1e-5)


def test_a_missing_entry_of_the_batch_is_named():
    context = batch_context({"tokens": jnp.zeros((1, 2), jnp.int32), "images": jnp.ones((1, 3))})
    np.testing.assert_array_equal(context.extra("images"), jnp.ones((1, 3)))
    with pytest.raises(RequestError, match=r"the batch has no entry 'audio'\n *expected: one of \['images'\]"):
        context.extra("audio")
