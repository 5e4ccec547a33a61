"""Engines of models that read images, and prompts with images."""

import functools

import jax
import numpy as np
from flax import nnx

from axlearn_core.config import patch, replace_config
from axlearn_plugins_transformer.causal_lm import CausalLM
from axlearn_plugins_transformer.generate import Generator
from support import toy_models
from support.extended_models import FEATURES, IMAGE, Captioner

SIZES = {
    "runner.block_size": 4, "runner.max_context": 64, "runner.max_rows": 4, "runner.max_step_tokens": 16,
    "runner.chunk": 8, "runner.row_buckets": (1,), "runner.chunk_buckets": (1,), "runner.extras": True,
}  # fmt: skip
COUNT = 6
"""Number of tokens to generate."""


def small_config():
    return patch(toy_models.config("quickstart"), {"model.dtype": "float32", "model.output_dtype": "float32"}).model


def randomized(config, seed=0):
    """Build a model with weights that are large enough for tokens to differ."""
    built, rng = config.build(rngs=nnx.Rngs(seed)), np.random.default_rng(seed)
    state = jax.tree.map(lambda x: x + 0.3 * rng.standard_normal(x.shape).astype(x.dtype), nnx.state(built, nnx.Param))
    nnx.update(built, state)
    return built


@functools.cache
def captioner():
    return randomized(replace_config(small_config(), CausalLM, Captioner.Config()))


def prompts_with_images(count, seed, *, without=0):
    """Return prompts of random lengths, each with an image. The last `without` prompts have none."""
    rng = np.random.default_rng(seed)
    cases = []
    for index in range(count):
        prompt = rng.integers(3, toy_models.VOCABULARY, rng.integers(1, 40)).tolist()
        prompt[rng.integers(len(prompt))] = IMAGE
        images = 4 * rng.standard_normal((1, FEATURES)).astype(np.float32)
        cases.append((prompt, {"images": images} if index < count - without else {}))
    return cases


def alone(built, cases):
    """Return the tokens that `generate` gives for each prompt."""
    generator = Generator(built)
    return [tuple(generator(prompt, max_tokens=COUNT, extras=extras)) for prompt, extras in cases]
