"""A runner over a mesh of virtual devices computes the tokens of one device."""

import jax
import numpy as np
import pytest
from flax import nnx

from axlearn_core.compose import compose
from axlearn_core.config import patch
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_serving.runner import ModelRunner
from axlearn_plugins_transformer.generate import Generator
from support.serving_models import SIZES, SMALL, Requests, prompts


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_tensor_parallel_is_one_device():
    sizes = {**SMALL, "model.decoder.layer.attention.num_kv_heads": 4, "mesh.shape": {"tensor": 4}}
    cfg = patch(resolve("quickstart").config, sizes)
    program = compose(cfg, jax.devices()[:4])
    model = cfg.model.build(rngs=nnx.Rngs(0))
    instance = ModelRunner.Config(**SIZES).build(model=model, program=program)
    pages = jax.tree.leaves(instance.read_blocks([0]))[0]
    assert pages.shape[1:3] == (2, 4), "keys, then values, of four heads"
    shapes = {shard.data.shape for x in jax.tree.leaves(instance.cache) for shard in x.addressable_shards}
    assert {shape[1:3] for shape in shapes} == {(2, 1)}, "each device holds the keys and values of one head"
    rng = np.random.default_rng(0)
    some = prompts(rng, model.vocab_size)
    requests = Requests(instance, some, rng=rng)
    requests.random_steps(8)
    generator = Generator(model)
    for prompt, output in zip(some, requests.outputs, strict=True):
        assert output[:8] == list(generator(prompt, max_tokens=8))
