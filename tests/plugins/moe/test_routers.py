"""Routing weights equal the definitions of the papers, written token by token in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.compose import Functional
from axlearn_core.config import Node, node
from axlearn_core.errors import RequestError
from axlearn_core.nn import summaries
from axlearn_core.nn.layer import Precision
from axlearn_plugins_moe.routers import ExpertChoiceRouter, ScoreFunction, SigmoidRouter, SigmoidScore, SoftmaxRouter

E = 6


@node
class SqrtSoftplus(Node[ScoreFunction]):
    """A score function of another package."""

    def build(self, **_):
        return lambda logits: jnp.sqrt(jax.nn.softplus(logits))


@node
class Scores(Node[ScoreFunction]):
    """Score functions that break the protocol."""

    kind: str = "sum"

    def build(self, **_):
        kinds = {
            "sum": lambda logits: logits.sum(-1),
            "narrow": lambda logits: logits.astype(jnp.bfloat16),
            "none": None,
        }
        return kinds[self.kind]


def routed(cfg, x, top_k=2, weight=None, bias=None, logit_bias=None):
    """Token -> {expert: weight} of each row, the losses, the summaries, and the router's state after the call."""
    router = cfg.build(input_dim=x.shape[-1], num_experts=E, top_k=top_k, rngs=nnx.Rngs(0), precision=Precision())
    if weight is not None:
        router.weight[...] = jnp.asarray(weight)
    if bias is not None:
        router.bias[...] = jnp.asarray(bias)
    if logit_bias is not None:
        router.logit_bias[...] = jnp.asarray(logit_bias)
    graph, state = nnx.split(router)

    @jax.jit
    def run(state):
        router = nnx.merge(graph, state)
        with summaries.collect() as collector:
            routing = router(jnp.asarray(x))
        return routing, collector.losses, collector.summaries, nnx.state(router)

    routing, losses, reported, after = run(state)
    expert, weights = np.asarray(routing.expert), np.asarray(routing.weight)
    token = np.arange(expert.shape[1])[None] % x.shape[1] + 0 * expert if routing.token is None else routing.token
    rows = []
    for b in range(x.shape[0]):
        rows.append([{} for _ in range(x.shape[1])])
        for e, t, w in zip(expert[b], np.asarray(token)[b], weights[b], strict=True):
            assert e not in rows[b][t]
            rows[b][t][int(e)] = float(w)
    return rows, losses, reported, after


def inputs(rows=2, length=7, width=5, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, length, width)).astype(np.float32), rng.normal(size=(width, E)).astype(np.float32)


def same(rows, expected):
    for row, want in zip(rows, expected, strict=True):
        for row_weights, weights in zip(row, want, strict=True):
            assert row_weights == pytest.approx(weights, rel=1e-5)


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


def test_a_softmax_over_the_chosen_experts_with_a_bias():
    """The router of gpt-oss: the bias affects the choice and the weights."""
    x, w = inputs()
    bias = np.asarray([0.3, -0.2, 0, 0.9, -0.5, 2.0], np.float32)
    rows, losses, _, _ = routed(SoftmaxRouter.Config(logit_bias=True), x, top_k=3, weight=w, logit_bias=bias)
    expected = []
    for row in x @ w + bias:
        expected.append([])
        for logits in row:
            best = np.argsort(-logits)[:3]
            expected[-1].append(dict(zip(best.tolist(), softmax(logits[best]), strict=True)))
    same(rows, expected)
    log_z = np.log(np.exp(x @ w + bias).sum(-1))
    assert float(losses["router_z_loss"]) == pytest.approx(0.001 * (log_z**2).mean(), rel=1e-5)


@pytest.mark.slow_cases("sigmoid-score")
@pytest.mark.parametrize("name", ["sigmoid-score", "sqrt-softplus"])
def test_a_score_function_in_each_router(name):
    x, w = inputs()
    sigmoid = name == "sigmoid-score"
    score = (lambda z: 1 / (1 + np.exp(-z))) if sigmoid else (lambda z: np.sqrt(np.log1p(np.exp(z))))
    kind = SoftmaxRouter if sigmoid else SigmoidRouter
    cfg = kind.Config(score=SigmoidScore() if sigmoid else SqrtSoftplus(), load_balance=0.5, normalize=not sigmoid)
    rows, losses, _, _ = routed(cfg, x, weight=w)
    scores, expected, share, balance = score(x @ w), [], np.zeros((2, E)), []
    for row, used in zip(scores, share, strict=True):
        expected.append([])
        for token in row:
            best = np.argsort(-token)[:2]
            used[best] += 1 / 14
            expected[-1].append({int(e): token[e] / (1 if sigmoid else token[best].sum()) for e in best})
        balance.append((row / row.sum(-1, keepdims=True)).mean(0))
    same(rows, expected)
    used, mean = (
        (share.mean(0, keepdims=True), np.mean(balance, 0, keepdims=True)) if sigmoid else (share, np.stack(balance))
    )
    assert float(losses["load_balance"]) == pytest.approx(0.5 * E * (used * mean).sum(-1).mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "message"), [("sum", "must keep the shape"), ("narrow", "dtype"), ("none", "a score function")]
)
def test_score_functions_that_break_the_protocol(kind, message):
    with pytest.raises(RequestError, match=message) as error:
        routed(SigmoidRouter.Config(score=Scores(kind=kind)), inputs()[0])
    assert "Scores" in str(error.value)
    assert "fix: " in str(error.value)


def test_sigmoid_selects_by_the_bias_and_weighs_without_it():
    x, w = inputs()
    bias = np.asarray([0.3, -0.2, 0, 0.9, -0.5, 0], np.float32)
    cfg = SigmoidRouter.Config(scale=2.5, load_balance=0.1)
    rows, losses, _, after = routed(cfg, x, weight=w, bias=bias)
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
    assert losses.keys() == {"load_balance"}
    np.testing.assert_array_equal(after["load"].get_value(), np.round(load))
    np.testing.assert_array_equal(after["bias"].get_value(), bias)  # moves at the end of the step only


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


def built(**settings):
    cfg = SigmoidRouter.Config(**settings)
    return cfg.build(input_dim=5, num_experts=E, top_k=2, rngs=nnx.Rngs(0), precision=Precision())


def test_a_step_moves_the_bias_against_the_load_of_all_its_microbatches():
    x, w = inputs()
    whole, parts, still = built(rate=0.25), built(rate=0.25), built(rate=0.0)
    for router in (whole, parts, still):
        router.weight[...] = jnp.asarray(w)
    whole(jnp.asarray(x))
    still(jnp.asarray(x))
    for row in x:
        parts(jnp.asarray(row[None]))
    load = np.asarray(whole.load[...])
    assert load.sum() == 2 * 7 * 2
    np.testing.assert_array_equal(parts.load[...], load)
    for router in (whole, parts, still):
        router.end_step()
    np.testing.assert_array_equal(whole.bias[...], -0.25 * np.sign(load - load.mean()))
    np.testing.assert_array_equal(parts.bias[...], whole.bias[...])
    np.testing.assert_array_equal(still.bias[...], np.zeros(E))


def test_evaluation_counts_no_load():
    router = built()
    router.eval()
    router(jnp.asarray(inputs()[0]))
    np.testing.assert_array_equal(router.load[...], np.zeros(E))


def test_its_state_is_float32_and_no_parameter():
    cfg = SigmoidRouter.Config()
    sizes = {"input_dim": 5, "num_experts": E, "top_k": 2}
    functional = Functional.from_config(cfg, precision=Precision("bfloat16", "bfloat16"), **sizes)
    assert functional.abstract.keys() == {"weight"}
    assert {p: (s.shape, str(s.dtype)) for p, s in functional.variables.items()} == {"bias": ((E,), "float32")}
    assert functional.variable_axes == {"bias": ("experts",)}
    assert functional.totals.keys() == {"load"}
    assert functional.batch_dependence == ()  # a step in microbatches is the same


@pytest.mark.parametrize("experts", [2, 8])
def test_batch_invariant_logits_do_not_depend_on_the_number_of_tokens(experts):
    sizes = {"input_dim": 64, "num_experts": experts, "top_k": 2, "rngs": nnx.Rngs(0), "precision": Precision()}
    router = SoftmaxRouter.Config().build(**sizes, batch_invariant=True)
    logits = jax.jit(router.logits)
    x = np.random.default_rng(0).standard_normal((1, 256, 64)).astype(np.float32)
    many, few = np.asarray(logits(x)), np.asarray(logits(x[:, :64]))
    assert many.shape[-1] == experts
    assert many[:, :64].tobytes() == few.tobytes()
    plain = SoftmaxRouter.Config().build(**{**sizes, "rngs": nnx.Rngs(0)})
    assert np.allclose(plain.logits(jnp.asarray(x)), many, atol=1e-5)
