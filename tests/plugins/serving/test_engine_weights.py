"""Weights that an engine copies, or shares with a training program."""

import jax
import numpy as np
import pytest
from flax import nnx

from axlearn_core.compose import Functional
from axlearn_core.errors import RequestError
from axlearn_plugins_serving.runner import ModelRunner
from axlearn_plugins_transformer.cache_spec import CacheEntry
from axlearn_plugins_transformer.stack_layers import stack_cache_spec
from support.serving_models import SIZES, Requests, config, model, prompts

SHARED = ["decoder.embedding.weight", "decoder.head.weight", "decoder.norm.weight"]
"""Arrays that separate layers do not change. Those of layers are stacked in training."""


@pytest.fixture(scope="module")
def runner():
    return ModelRunner.Config(**SIZES, row_buckets=(), chunk_buckets=()).build(model=model())


def training_weights(runner, seed=1):
    """Return weights on the devices of a runner, which nobody else uses."""
    functional = Functional.from_config(config())
    return runner.program.place(functional.extract_weights(config().build(rngs=nnx.Rngs(seed))))


def count_bytes(arrays):
    return sum(x.nbytes for x in arrays.values())


def donate(weights):
    """Donate the weights, as a training step does."""
    jax.block_until_ready(jax.jit(lambda x: jax.tree.map(lambda y: y * 0, x), donate_argnums=0)(weights))


def choose(runner, count=3):
    requests = Requests(runner, prompts(np.random.default_rng(0), 64))
    requests.random_steps(count)
    return requests.outputs


def test_arrays_that_fit_are_shared_and_the_rest_is_copied(runner):
    weights = training_weights(runner)
    copied = runner.update_weights(weights, share=True)
    assert copied == count_bytes(weights.params) - sum(weights.params[path].nbytes for path in SHARED)
    pointers = {path: weights.params[path].unsafe_buffer_pointer() for path in SHARED}
    assert {path: runner.weights.arrays[path].unsafe_buffer_pointer() for path in SHARED} == pointers
    shared = choose(runner)
    assert runner.update_weights(weights) == count_bytes(weights.params)
    assert runner.weights.arrays[SHARED[0]].unsafe_buffer_pointer() != pointers[SHARED[0]]
    assert choose(runner) == shared


def test_donated_weights_are_reported_until_the_next_update(runner):
    weights = training_weights(runner)
    runner.update_weights(weights, share=True)
    expected = choose(runner)
    donate(weights)
    with pytest.raises(RequestError, match="has donated them to a training step\n    fix: call `update_weights`"):
        choose(runner)
    with pytest.raises(RequestError, match=r"donated or deleted before the update: decoder\.embedding\.weight"):
        runner.update_weights(weights, share=True)
    runner.update_weights(training_weights(runner), share=True)
    assert choose(runner) == expected


def test_copies_outlive_a_donation(runner):
    weights = training_weights(runner)
    runner.update_weights(weights)
    expected = choose(runner)
    donate(weights)
    assert choose(runner) == expected


def test_weights_of_another_dtype_are_refused(runner):
    weights = training_weights(runner)
    changed = {**weights.params, SHARED[0]: weights.params[SHARED[0]].astype("bfloat16")}
    with pytest.raises(RequestError, match=r"bfloat16 \(64, 64\)\n    expected: float32 \(64, 64\)"):
        runner.update_weights(type(weights)(changed, {}))


def test_weights_in_the_memory_of_the_host_are_transferred(runner):
    weights = training_weights(runner)
    on_host = type(weights)(jax.tree.map(np.asarray, weights.params), weights.variables)
    copied = runner.update_weights(on_host, share=True)
    assert copied == 2 * count_bytes(weights.params) - sum(weights.params[path].nbytes for path in SHARED)
    outputs = choose(runner)
    runner.update_weights(weights)
    assert choose(runner) == outputs


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fast", "parity"])
@pytest.mark.parametrize(
    "features", [("moe",), ("mla",), ("lora:target=model.**",), ("multi-token-prediction",)], ids=str
)
def test_shared_weights_of_other_models_give_the_outputs_of_copies(mode, features):
    cfg = config(*features)
    one = ModelRunner.Config(**SIZES, mode=mode, row_buckets=(), chunk_buckets=()).build(model=model(*features))
    functional = Functional.from_config(cfg)
    weights = one.program.place(functional.extract_weights(cfg.build(rngs=nnx.Rngs(1))))
    copied = one.update_weights(weights)
    expected = choose(one, 6)
    assert one.update_weights(weights, share=True) < copied
    assert choose(one, 6) == expected


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fast", "parity"])
@pytest.mark.parametrize("features", [(), ("moe",), ("mla",)], ids=str)
def test_stacked_weights_are_shared_and_give_the_outputs_of_separate_ones(mode, features):
    cfg, outputs = config(*features), []
    weights = Functional.from_config(cfg).extract_weights(cfg.build(rngs=nnx.Rngs(1)))
    for layers in ("separate", "stacked"):
        options = {**SIZES, "mode": mode, "layers": layers, "row_buckets": (), "chunk_buckets": ()}
        one = ModelRunner.Config(**options).build(model=model(*features))
        placed = one.program.place(weights)
        copied = one.update_weights(placed, share=True)
        assert (copied == 0) == (layers == "stacked")
        outputs.append(choose(one, 6))
    assert outputs[0] == outputs[1]


@pytest.mark.slow
def test_blocks_of_stacked_layers_move_together():
    one = ModelRunner.Config(**SIZES, layers="stacked", row_buckets=(), chunk_buckets=()).build(model=model())
    choose(one)
    layers = [x.shape[0] for x in jax.tree.leaves(one.cache)]
    assert layers == [2]
    before = one.read_blocks([0, 1, 2, 3])
    assert before[0].shape[:2] == (4, 2)
    one.copy_blocks([(0, 5)])
    np.testing.assert_array_equal(one.read_blocks([5])[0], before[0][:1])
    one.write_blocks([7, 6], tuple(x[1:3] for x in before))
    np.testing.assert_array_equal(one.read_blocks([7, 6])[0], before[0][1:3])


def test_stacked_weights_need_a_plain_stack_without_drafts():
    sizes = {**SIZES, "layers": "stacked"}
    with pytest.raises(RequestError, match=r"steps draft tokens(.|\n)*runner\.layers=separate"):
        ModelRunner.Config(**sizes, drafts=True).build(model=model("multi-token-prediction"))
    state = CacheEntry(per="request", shape=(2,), dtype="float32")
    with pytest.raises(RequestError, match="do not cache pages of tokens"):
        stack_cache_spec(object(), [state, state])


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_weights_of_another_mesh_are_moved_on_the_devices():
    """Weights that training shards, for an engine on one of its devices."""
    one = ModelRunner.Config(**SIZES, row_buckets=(), chunk_buckets=()).build(model=model())
    weights = training_weights(one)
    one.update_weights(weights)
    expected = choose(one)
    mesh = jax.make_mesh((2,), ("fsdp",))
    spec = jax.sharding.PartitionSpec("fsdp")
    divided = {
        path: jax.device_put(x, jax.NamedSharding(mesh, spec if x.shape[0] % 2 == 0 else jax.sharding.PartitionSpec()))
        for path, x in weights.params.items()
    }
    copied = one.update_weights(type(weights)(divided, {}), share=True)
    assert copied > count_bytes(weights.params)
    assert choose(one) == expected
