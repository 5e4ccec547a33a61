"""Every decoder family: requests get the tokens that they get alone, and the scores of training."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from axlearn_core.config import patch
from axlearn_plugins_serving.drafting import NgramDrafter
from axlearn_plugins_serving.local_engine import serve
from axlearn_plugins_transformer.generate import Generator
from support import toy_models
from support.score_parity import check_parity_scores

SIZES = {
    "runner.block_size": 4, "runner.max_context": 64, "runner.max_rows": 5, "runner.max_step_tokens": 24,
    "runner.chunk": 8, "runner.row_buckets": (1,), "runner.chunk_buckets": (1,),
}  # fmt: skip
SETTINGS = {
    "preempted": {"runner.num_blocks": 22},
    "speculative": {"drafter": NgramDrafter.Config(ngram=1, length=3)},
    "held": {"runner.decode_steps": 3, "hold_seconds": 9.0},
}
QUICK = ("quickstart",)
FLOAT32 = {"model.dtype": "float32", "model.output_dtype": "float32"}


@functools.cache
def family(experiment, width=32):
    """Build an experiment's model in float32 at toy size, with weights large enough that tokens differ."""
    cfg = patch(toy_models.config(experiment), {**FLOAT32, "model.decoder.hidden_dim": width})
    built = cfg.model.build(rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    scale = 0.3 * (32 / width) ** 0.5
    state = jax.tree.map(
        lambda x: x + scale * rng.standard_normal(x.shape).astype(x.dtype), nnx.state(built, nnx.Param)
    )
    nnx.update(built, state)
    return cfg.model, built


def prompts(count, seed=0):
    """Return prompts, some of which share prefixes or repeat themselves."""
    rng = np.random.default_rng(seed)
    start = rng.integers(0, toy_models.VOCABULARY, 20).tolist()
    rows = []
    for _ in range(count):
        own = rng.integers(0, toy_models.VOCABULARY, int(rng.integers(1, 9))).tolist()
        rows.append([*start[: int(rng.choice([0, 5, 20]))], *own, *own])
    return rows


def _each(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("experiment", _each(toy_models.experiments()))
def test_every_request_gets_the_tokens_that_it_gets_alone(experiment, setting):
    _, built = family(experiment)
    batch = prompts(12)
    with serve(built, set={**SIZES, **SETTINGS[setting]}) as engine:
        generations = engine.generate(batch, max_tokens=14, temperature=0)
        statistics = engine.statistics()
    assert statistics.compilations == 0
    assert statistics.used_blocks == 0
    assert statistics.cached_prompt_tokens > 0
    assert (statistics.preemptions > 0) == (setting == "preempted")
    assert (statistics.drafted_tokens > 0) == (setting == "speculative")
    generator = Generator(built)
    for prompt, generation in zip(batch, generations, strict=True):
        expected = tuple(generator(prompt, max_tokens=14))
        if generation.tokens != expected:  # allowed only after a step with two nearly equal best logits
            pairs = zip(generation.tokens, expected, strict=True)
            index = next(i for i, (got, want) in enumerate(pairs) if got != want)
            tokens = np.asarray([[*prompt, *expected[:index]]], np.int32)
            logits = np.sort(np.asarray(built(tokens)[0, -1], np.float32))
            assert logits[-1] - logits[-2] < 1e-4, (prompt, generation.tokens, expected)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", toy_models.experiments())
def test_parity_is_bitwise(experiment):
    cfg, built = family(experiment, width=64)
    check_parity_scores(cfg, built, seeds=1)
