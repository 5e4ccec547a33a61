"""Routers use recorded experts in place of their own choice, and still compute the weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.nn import summaries
from axlearn_core.nn.layer import Precision
from axlearn_plugins_moe.replay import Replay, use_replay
from axlearn_plugins_moe.routers import SigmoidRouter, SoftmaxRouter

ROWS, LENGTH, WIDTH, EXPERTS, TOP_K = 2, 6, 8, 8, 2


def build(kind):
    config = kind.Config(load_balance=0.0)
    sizes = {"input_dim": WIDTH, "num_experts": EXPERTS, "top_k": TOP_K}
    router = config.build(rngs=nnx.Rngs(0), precision=Precision(), **sizes)
    router.eval()
    return router


def inputs():
    return jnp.asarray(np.random.default_rng(1).standard_normal((ROWS, LENGTH, WIDTH)), jnp.float32)


def route(router, x, replay):
    with summaries.collect() as collected, use_replay(replay):
        return router(x), collected.summaries


@pytest.mark.parametrize("kind", [SoftmaxRouter, SigmoidRouter])
def test_a_moved_router_uses_recorded_experts_with_its_own_weights(kind):
    router, x = build(kind), inputs()
    record = Replay()
    own, _ = route(router, x, record)
    recorded = record.chosen
    router.weight[...] = router.weight[...] + 0.2 * jax.random.normal(jax.random.key(3), (WIDTH, EXPERTS))
    free = Replay()
    moved, _ = route(router, x, free)
    differs = np.any(np.sort(free.chosen, -1) != np.sort(recorded, -1), -1)
    assert 0 < differs.mean() < 1, "the perturbation changes the experts of some tokens"
    for used in (True, False):
        replay = Replay(jnp.asarray(recorded, jnp.int16), used)
        result, report = route(router, x, replay)
        np.testing.assert_array_equal(replay.chosen, recorded if used else free.chosen)
        np.testing.assert_array_equal(result.expert, own.expert if used else moved.expert)
        np.testing.assert_allclose(report["router_mismatch"].value, differs.mean(), rtol=1e-6)
    scores = np.asarray(router.scores(router.logits(x)))
    picked = np.take_along_axis(scores, np.asarray(recorded), -1)
    expected = picked / picked.sum(-1, keepdims=True)
    weight, _ = route(router, x, Replay(recorded))
    np.testing.assert_allclose(weight.weight, np.moveaxis(expected, 2, 1).reshape(ROWS, -1), rtol=1e-6)


def test_tokens_without_a_record_keep_their_own_experts():
    router, x = build(SoftmaxRouter), inputs()
    own = Replay()
    route(router, x, own)
    recorded = np.asarray((own.chosen + 1) % EXPERTS).copy()
    recorded[:, 3:] = -1
    replay = Replay(jnp.asarray(recorded))
    _, report = route(router, x, replay)
    np.testing.assert_array_equal(replay.chosen[:, :3], recorded[:, :3])
    np.testing.assert_array_equal(replay.chosen[:, 3:], own.chosen[:, 3:])
    assert report["router_mismatch"].value == pytest.approx(0.5)


@pytest.mark.slow
def test_gradients_flow_through_the_weights_of_recorded_experts():
    router, x = build(SoftmaxRouter), inputs()
    recorded = jnp.broadcast_to(jnp.int32([3, 5]), (ROWS, LENGTH, TOP_K))

    graph, state = nnx.split(router)

    def loss(state):
        with use_replay(Replay(recorded)):
            return jnp.sum(nnx.merge(graph, state)(x).weight[:, :LENGTH])

    gradient = np.asarray(jax.grad(loss)(state).weight.get_value())
    assert np.abs(gradient[:, [3, 5]]).min() > 0
    assert np.abs(np.delete(gradient, [3, 5], axis=1)).max() < 1e-6  # a softmax over the chosen logits
