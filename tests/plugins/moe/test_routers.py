"""Routing weights against the definitions of the papers, written out token by token in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.errors import RequestError
from axlearn_core.learn import Learner, ParameterRule
from axlearn_core.nn import summaries
from axlearn_core.nn.layer import Precision
from axlearn_plugins_moe.optimizers import SignDescent
from axlearn_plugins_moe.routers import SCALE, ExpertChoiceRouter, SigmoidRouter, SoftmaxRouter

E = 6


def routed(cfg, x, top_k=2, weight=None, bias=None):
    """Token -> {expert: weight} of each row, the losses, the summaries, and the gradients of the losses."""
    router = cfg.build(input_dim=x.shape[-1], num_experts=E, top_k=top_k, rngs=nnx.Rngs(0), precision=Precision())
    if weight is not None:
        router.weight[...] = jnp.asarray(weight)
    if bias is not None:
        router.bias[...] = jnp.asarray(bias)
    graph, state = nnx.split(router)

    @jax.jit
    def run(state):
        def loss(state):
            with summaries.collect() as found:
                routing = nnx.merge(graph, state)(jnp.asarray(x))
            return sum(found.losses.values(), start=jnp.float32(0)), (routing, found.losses, found.summaries)

        return jax.grad(loss, has_aux=True)(state)

    grads, (routing, losses, reported) = run(state)
    expert, weights = np.asarray(routing.expert), np.asarray(routing.weight)
    token = np.arange(expert.shape[1])[None] % x.shape[1] + 0 * expert if routing.token is None else routing.token
    rows = []
    for b in range(x.shape[0]):
        rows.append([{} for _ in range(x.shape[1])])
        for e, t, w in zip(expert[b], np.asarray(token)[b], weights[b], strict=True):
            assert e not in rows[b][t]
            rows[b][t][int(e)] = float(w)
    return rows, losses, reported, grads


def inputs(rows=2, length=7, width=5, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, length, width)).astype(np.float32), rng.normal(size=(width, E)).astype(np.float32)


def same(rows, expected):
    for row, want in zip(rows, expected, strict=True):
        for found, weights in zip(row, want, strict=True):
            assert found == pytest.approx(weights, rel=1e-5)


def softmax(logits):
    z = np.exp(logits - logits.max(-1, keepdims=True))
    return z / z.sum(-1, keepdims=True)


@pytest.mark.parametrize(("top_k", "normalize"), [(2, None), (3, False), (1, None)])
def test_softmax(top_k, normalize):
    x, w = inputs()
    rows, losses, _, _ = routed(
        SoftmaxRouter.Config(normalize=normalize, load_balance=0.5, z_loss=0.25), x, top_k=top_k, weight=w
    )
    p = softmax(x @ w)
    expected, share = [], np.zeros(E)
    for row in p:
        expected.append([])
        for token in row:
            best = np.argsort(-token)[:top_k]
            total = token[best].sum() if top_k > 1 and normalize is None else 1.0
            expected[-1].append({int(e): token[e] / total for e in best})
            share[best] += 1 / (14 * top_k)
    same(rows, expected)
    assert float(losses["load_balance"]) == pytest.approx(0.5 * E * (share * p.mean((0, 1))).sum(), rel=1e-5)
    log_z = np.log(np.exp(x @ w).sum(-1))
    assert float(losses["router_z_loss"]) == pytest.approx(0.25 * (log_z**2).mean(), rel=1e-5)


def test_sigmoid_selects_by_the_bias_and_weighs_without_it():
    x, w = inputs()
    bias = np.asarray([0.3, -0.2, 0, 0.9, -0.5, 0], np.float32)
    cfg = SigmoidRouter.Config(scale=2.5, load_balance=0.1)
    rows, losses, _, grads = routed(cfg, x, weight=w, bias=bias)
    scores = 1 / (1 + np.exp(-(x @ w)))
    expected, balance, load = [], [], np.zeros(E)
    for row in scores:
        expected.append([])
        share = np.zeros(E)
        for token in row:
            best = np.argsort(-(token + bias))[:2]
            expected[-1].append({int(e): 2.5 * token[e] / token[best].sum() for e in best})
            share[best] += 1 / 14
        balance.append(E * (share * (row / row.sum(-1, keepdims=True)).mean(0)).sum())
        load += share * 14
    same(rows, expected)
    assert float(losses["load_balance"]) == pytest.approx(0.1 * np.mean(balance), rel=1e-5)
    # The loss that carries the bias's gradient is zero; the gradient says by how much a load is above the mean.
    assert losses["router_bias"] == 0
    np.testing.assert_allclose(grads["bias"].get_value(), SCALE * (load / load.mean() - 1), rtol=1e-5, atol=1e-12)


def test_sigmoid_uses_the_best_groups_only():
    x, w = inputs()
    cfg = SigmoidRouter.Config(num_groups=3, top_groups=1, normalize=False)
    rows, _, _, _ = routed(cfg, x, weight=w)
    scores = 1 / (1 + np.exp(-(x @ w)))
    expected = []
    for row in scores:
        expected.append([])
        for token in row:
            best = int(np.argmax(token.reshape(3, 2).sum(-1)))
            expected[-1].append({e: token[e] for e in (2 * best, 2 * best + 1)})
    same(rows, expected)


@pytest.mark.parametrize("settings", [{"num_groups": 4}, {"num_groups": 6}, {"num_groups": 2, "top_groups": 3}])
def test_groups_that_do_not_fit(settings):
    with pytest.raises(RequestError, match="num_groups="):
        routed(SigmoidRouter.Config(**settings), inputs()[0])


def test_experts_choose_tokens():
    x, w = inputs()
    rows, losses, reported, _ = routed(ExpertChoiceRouter.Config(), x, weight=w)
    p = softmax(x @ w)
    expected = []
    for row in p:
        expected.append([{} for _ in range(7)])
        for e in range(E):
            for t in np.argsort(-row[:, e])[:3]:  # ceil(7 * 2 / 6)
                expected[-1][t][e] = row[t, e]
    same(rows, expected)
    assert losses == {}
    without = np.mean([not token for row in expected for token in row])
    assert float(reported["tokens_without_expert"]) == pytest.approx(without, abs=1e-6)


def test_a_row_of_one_token_takes_its_likeliest_experts():
    x, w = inputs(length=1)
    rows, _, _, _ = routed(ExpertChoiceRouter.Config(), x, weight=w)
    p = softmax(x @ w)
    same(rows, [[{int(e): row[0, e] for e in np.argsort(-row[0])[:2]}] for row in p])


def test_sign_descent_moves_the_bias_against_the_load_and_nothing_else():
    params = {"router.bias": jnp.zeros(3), "router.weight": jnp.ones(3)}
    grads = {"router.bias": jnp.asarray([2e-6, -1e-9, 0.0]), "router.weight": jnp.full(3, 0.1)}
    rule = ParameterRule(pattern="**.bias", optimizer=SignDescent(rate=0.25))
    learner = Learner.Config(rules=(rule,)).build(max_steps=10)
    new, _, report = learner.update(grads, learner.init(params), params, jnp.float32(1.0))
    np.testing.assert_array_equal(new["router.bias"], [-0.25, 0.25, 0.0])
    assert float(report["grad_norm"]) == pytest.approx(0.1 * 3**0.5)
