"""The runner: requests get the tokens that they get alone, nothing compiles after warm-up, and blocks move."""

import jax
import numpy as np
import pytest
from flax import nnx

from axlearn_core.compose import Functional
from axlearn_core.config import patch
from axlearn_core.errors import RequestError
from axlearn_plugins_serving.contracts import Row, Sampling
from axlearn_plugins_serving.runner import ModelRunner
from axlearn_plugins_transformer.generate import Generator
from support import extended_models
from support.serving_models import FAMILIES, SIZES, Requests, config, family, model, prompts, runner


def check(instance, of, seed, count=8):
    rng = np.random.default_rng(seed)
    some = prompts(rng, of.vocab_size)
    requests = Requests(instance, some, rng=rng)
    requests.random_steps(count)
    generator = Generator(of)
    for prompt, output in zip(some, requests.outputs, strict=True):
        assert output[:count] == list(generator(prompt, max_tokens=count))


@pytest.mark.fast_cases("()")
@pytest.mark.parametrize("features", [(), ("alibi",), ("mla",), ("interleave",), ("moe",)], ids=str)
def test_requests_together_get_what_each_gets_alone(features):
    instance = runner(*features, chunk_buckets=(1,))
    for seed in range(3):
        check(instance, model(*features), seed)
    assert instance.compilations == 0


@pytest.mark.slow
def test_added_inputs_and_shared_caches_give_the_same_tokens():
    extended = extended_models.extended(config()).build(rngs=nnx.Rngs(0))
    instance = ModelRunner.Config(**SIZES).build(model=extended)
    check(instance, extended, seed=0, count=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name):
    instance = ModelRunner.Config(**SIZES).build(model=family(name))
    for seed in range(3):
        check(instance, family(name), seed)


@pytest.mark.slow
def test_several_steps_in_one_dispatch_are_those_steps():
    some = prompts(np.random.default_rng(1), 64)
    instance = runner(decode_steps=4)
    requests = Requests(instance, some)
    requests.step({0: 5, 1: 13, 2: 1})
    requests.step({3: 21})
    requests.step(dict.fromkeys(range(4)), steps=4)
    requests.step(dict.fromkeys(range(4)), steps=3)
    generator = Generator(model())
    for prompt, output in zip(some, requests.outputs, strict=True):
        assert output == list(generator(prompt, max_tokens=8))
    assert instance.compilations == 0


def test_a_step_may_be_submitted_before_the_last_one_is_read():
    some = prompts(np.random.default_rng(2), 64)
    requests = Requests(runner(chunk_buckets=(1,)), some)
    requests.step({0: 5, 1: 13, 2: 1})
    requests.step({3: 21})
    pending = [
        requests.runner.submit(
            [
                Row(slot=requests.slots[i], start=requests.done[i] + step, blocks=requests.blocks[i])
                for i in range(len(some))
            ]
        )
        for step in range(5)
    ]
    for step in pending:
        for output, result in zip(requests.outputs, step.wait(), strict=True):
            output += result.tokens
    generator = Generator(model())
    for prompt, output in zip(some, requests.outputs, strict=True):
        assert output == list(generator(prompt, max_tokens=6))


def test_more_tokens_than_a_step_has_room_for_take_several_calls():
    rng = np.random.default_rng(3)
    some = prompts(rng, 64, (3, 3, 2, 2))
    requests = Requests(runner(chunk_buckets=(1,)), some)
    requests.step(dict.fromkeys(range(4), 4))
    generator = Generator(model())
    assert [o[0] for o in requests.outputs] == [next(generator(p, max_tokens=1)) for p in some]


def test_blocks_are_copied_read_and_written():
    rng = np.random.default_rng(4)
    instance, prompt = runner(chunk_buckets=(1,)), prompts(rng, 64, (13,))[0]
    expected = list(Generator(model())(prompt, max_tokens=4))
    first = Requests(instance, [prompt])
    first.step({0: 13})
    other_blocks = [b for b in range(instance.num_blocks) if b not in first.blocks[0]][: len(first.blocks[0])]
    instance.copy_blocks(list(zip(first.blocks[0], other_blocks, strict=True)))
    contents = instance.read_blocks(first.blocks[0])
    instance.write_blocks(first.blocks[0], jax.tree.map(np.zeros_like, contents))
    first.blocks[0] = other_blocks
    first.step({0: None})
    instance.write_blocks(first.blocks[0], contents)
    first.done[0] -= 1
    first.outputs[0].pop()
    instance.assign(first.slots[0], Sampling(temperature=0.0), 0, first.outputs[0])
    for _ in range(3):
        first.step({0: None})
    assert first.outputs[0] == expected


@pytest.mark.slow
def test_other_weights_are_taken_while_it_runs():
    instance = ModelRunner.Config(**SIZES).build(model=model())
    other = config().build(rngs=nnx.Rngs(1))
    functional = Functional.from_config(config())
    instance.update_weights(functional.extract_weights(other))
    check(instance, other, seed=5)
    weights = functional.extract_weights(other)
    del weights.params["decoder.norm.weight"]
    with pytest.raises(RequestError, match=r"decoder\.norm\.weight"):
        instance.update_weights(weights)


@pytest.mark.slow
def test_steps_of_several_tokens_are_for_rows_that_decode():
    with pytest.raises(RequestError, match="at most 1"):
        runner().submit([Row(slot=0, start=3, blocks=[0])], 2)


@pytest.mark.slow
def test_the_last_feed_forward_layer_runs_only_for_chosen_tokens():
    """Compare the FLOPs that a wider layer adds to a step: for all tokens in the first of two layers, and in the second only for
    chosen tokens and for a chunk whose targets are scored."""
    width, hidden, flops = 64, 64, []
    for factor in (1, 2):
        cfg = patch(config(), {"decoder.layer.feed_forward.hidden_dim": factor * hidden})
        instance = ModelRunner.Config(**{**SIZES, "max_step_tokens": 64}).build(model=cfg.build(rngs=nnx.Rngs(0)))
        bucket = instance.buckets[-1]
        flops.append(instance.program.lower("serve", bucket).cost_analysis()["flops"])
    added = (flops[1] - flops[0]) / (2 * 3 * width * hidden)
    assert added == pytest.approx(bucket.tokens + bucket.results + bucket.chunk, rel=0.05)
    assert added < 2 * bucket.tokens
