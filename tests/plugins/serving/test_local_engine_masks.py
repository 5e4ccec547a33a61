"""Layers of other packages with chunks, prefixes and selected keys: training, generation and the engine agree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.config import replace_config
from axlearn_core.errors import ConfigError, RequestError
from axlearn_plugins_serving.drafting import NgramDrafter
from axlearn_plugins_serving.local_engine import serve
from axlearn_plugins_transformer.attention_variants.latent import LatentAttention
from axlearn_plugins_transformer.generate import Generator, generate
from support import mask_layers, serving_models

SIZES = {"runner.block_size": 4, "runner.max_context": 32, "runner.max_rows": 3, "runner.max_step_tokens": 8}
SIZES |= {"runner.chunk": 8, "runner.row_buckets": (), "runner.chunk_buckets": ()}
NEW = 8


@functools.cache
def build(name):
    """Return a model with weights that make its tokens differ."""
    if name == "latent chunks":
        base = serving_models.config("mla")
        model = replace_config(base, LatentAttention, mask_layers.ChunkedLatentAttention.Config()).build(
            rngs=nnx.Rngs(0)
        )
    else:
        model = mask_layers.config(serving_models.config(), name).build(rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: x + 0.2 * rng.standard_normal(x.shape).astype(x.dtype), nnx.state(model, nnx.Param))
    nnx.update(model, state)
    return model


def prompts():
    """Return prompts that share their beginnings, within the prefix and after it."""
    rng = np.random.default_rng(1)
    start = rng.integers(0, 64, 12).tolist()
    ends = [rng.integers(0, 64, n).tolist() for n in (9, 3, 6, 2, 1)]
    return [[*start[:n], *end] for n, end in zip((4, 12, 12, 5, 4), ends, strict=True)] + [start]


def forward(model, rows):
    """Return the log-probabilities of rows, as in training."""
    length = max(map(len, rows))
    tokens = jnp.asarray([[*row, *[0] * (length - len(row))] for row in rows], jnp.int32)
    return jax.nn.log_softmax(jax.jit(lambda tokens: model(tokens))(tokens), axis=-1)


def check_engine(model, settings, tolerance=2e-4):
    """Compare the engine's tokens and log-probabilities with the forward pass of training."""
    requests = prompts()
    with serve(model, set=SIZES | settings, warm_up=False) as engine:
        results = engine.generate(requests, max_tokens=NEW, temperature=0)
        results += engine.generate(requests[:2], max_tokens=NEW, temperature=0)  # from cached blocks
        statistics, cache = engine.statistics(), engine.engine.cache
    requests += requests[:2]
    logprobs = forward(model, [[*p, *r.tokens] for p, r in zip(requests, results, strict=True)])
    for row, prompt, result in zip(np.asarray(logprobs), requests, results, strict=True):
        scores = row[len(prompt) - 1 : len(prompt) - 1 + NEW]
        assert tuple(np.argmax(scores, -1)) == result.tokens
        np.testing.assert_allclose([x.logprob for x in result.logprobs], scores.max(-1), atol=tolerance)
    return statistics, cache


@pytest.mark.slow
@pytest.mark.parametrize("name", [*mask_layers.LAYERS, "latent chunks"])
def test_the_engine_gives_the_logits_of_training(name):
    statistics, cache = check_engine(build(name), {})
    assert statistics.cached_prompt_tokens
    assert cache.window == (mask_layers.CHUNK if name.endswith("chunks") else None)
    assert cache.prefix == (mask_layers.PREFIX if name == "prefix" else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {"runner.kernel": "invariant"}) for name in mask_layers.LAYERS),
        ("prefix", {"runner.num_blocks": 10}),
        ("chunks", {"drafter": NgramDrafter.Config(ngram=1, length=3)}),
        ("chunks", {"runner.decode_steps": 3, "hold_seconds": 9.0}),
        ("selected", {"runner.kernel": "xla"}),
    ],
    ids=str,
)
def test_settings_of_the_engine_do_not_change_the_logits(name, settings):
    check_engine(build(name), settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", mask_layers.LAYERS)
def test_generation_gives_the_tokens_of_training(name):
    model = build(name)
    for prompt in prompts():
        tokens = list(Generator(model)(prompt, max_tokens=NEW))
        scores = np.asarray(forward(model, [[*prompt, *tokens]]))[0]
        assert np.argmax(scores[len(prompt) - 1 : -1], -1).tolist() == tokens


@pytest.mark.slow
def test_a_prompt_contains_the_prefix():
    model, match = build("prefix"), r"the prompt has 3 tokens, but the first 5 tokens attend.*\n.*\n.*fix:"
    with pytest.raises(RequestError, match=match):
        generate(model, [1, 2, 3], 4)
    with serve(model, set=SIZES, warm_up=False) as engine, pytest.raises(RequestError, match=match):
        engine.generate([[1, 2, 3]], max_tokens=4)
    with pytest.raises(RequestError, match=r"chunk cannot contain the prefix(.*\n)+.*fix: set serving.runner.chunk=5"):
        serve(model, set=SIZES | {"runner.chunk": 4}, warm_up=False)
    with pytest.raises(ConfigError, match="a step cannot contain the prefix"):
        serve(model, set=SIZES | {"scheduler.step_tokens": 4}, warm_up=False)
