"""Installed experiments at toy size, options for installed features, and batches."""

import contextlib
import functools
import hashlib

import jax
import numpy as np

from axlearn_core.config import get, patch
from axlearn_core.errors import PluginError, RequestError
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.resolve import resolve
from axlearn_testing.dropped import needed_features
from support.rollout_batches import random_batch

ROWS, LENGTH, VOCABULARY = 16, 16, 64

# Sizes that every mesh axis of up to eight devices divides.
SIZES = {
    "model.vocab_size": VOCABULARY,
    "model.decoder.num_layers": 2,
    "model.decoder.hidden_dim": 32,
    "model.decoder.layer.attention.num_heads": 8,
    "model.decoder.layer.feed_forward.hidden_dim": 64,
}


PUBLISHED = frozenset(
    """
    deepseek-v2-lite deepseek-v3 gemma2-2b gemma2-9b gemma3-4b gpt2-1.5b gpt2-124m mistral-7b mixtral-8x7b qwen2.5-7b qwen3-8b
    gpt-oss-20b gpt-oss-toy qwen3-next-80b-a3b qwen3-next-toy gemma3n-e2b gemma3n-e4b gemma4-26b-a4b gemma4-31b gemma4-e2b
    gemma4-e4b glm4.5-air glm4.6 glm4.7-flash glm-5 kimi-k2 deepseek-v3.2 dots1 k-exaone ernie4.5-21b-a3b granite3.1-3b-a800m
    qwen2-57b-a14b minimax-m2 olmoe-1b-7b hunyuan-a13b llama4-scout llama4-maverick
    apertus-8b gemma-2b gemma-7b gpt-neox-20b helium1-2b minitron-4b olmo-1b olmo-7b pythia-1.4b stablelm-3b stablelm2-1.6b
    afm-4.5b command-r-35b command-r7b ernie4.5-0.3b exaone4-1.2b exaone4-32b glm4-9b glm4-9b-0414 granite3.3-2b
    granite3.3-8b hunyuan-7b olmo2-32b olmo2-7b olmo3-7b phi3-mini phi4 seed-oss-36b smollm3-3b starcoder2-3b starcoder2-7b
    nemotron-h-8b nemotron-nano-9b-v2 nemotron3-nano-30b-a3b
    olmo-hybrid-7b lfm2-350m lfm2-700m lfm2-1.2b ministral-8b ministral3-3b ministral3-8b ministral3-14b
    qwen3.5-9b qwen3.5-35b-a3b gpt-oss-120b bamba-9b cwm-32b solar-open-100b kimi-linear-48b-a3b granite4-h-micro granite4-h-tiny
    """.split()  # noqa: SIM905
)
"""Made from a `config.json` by the table that imports weights: the tests of that table try their parts, by family."""


def experiments():
    """The names of what is installed and reads text, each part once; other models have tests of their own."""
    names = [entry.name for entry in registry().entries("experiments") if entry.name not in PUBLISHED]
    return [n for n in names if hasattr(registry().experiment(n).model, "decoder")]


def features():
    """The names of what is installed."""
    return [entry.name for entry in registry().entries("features")]


OPTIONS = {"mamba2": "head_dim=8"}
"""Of features whose default sizes are for wide models: eight heads, as the attention has."""


def use(name):
    """The text of `--with` for a feature, and for those that it needs."""
    cls = registry().feature(name)
    options = OPTIONS.get(name, cls.example)
    return [f"{name}:{options}" if options else name, *(text for n in needed_features(name) for text in use(n))]


@functools.cache
def small(experiment):
    """The experiment's config, with small sizes."""
    cfg = resolve(experiment).config
    heads = "model.decoder.layer.attention.num_kv_heads"
    return patch(cfg, SIZES if get(cfg, heads) is None else {**SIZES, heads: 8})


def config(experiment, *names, **settings):
    """The small experiment with features; raises `RequestError` where they do not go together."""
    texts = list(dict.fromkeys(text for name in names for text in use(name)))
    return resolve(small(experiment), with_=texts, set=settings).config


def fits(experiment, *names):
    """Whether the features go together on the experiment."""
    try:
        config(experiment, *names)
    except PluginError:
        raise  # one that fails, and does not refuse
    except RequestError:
        return False
    return True


def batch(seed=0, rows=ROWS):
    """Random tokens and what follows them; some targets do not count."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCABULARY, (rows, LENGTH + 1), dtype=np.int32)
    weights = (rng.random((rows, LENGTH)) < 0.9).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def batch_for(cfg, seed=0):
    """A batch for the input of a config: as `batch`, or of the arrays that its input says it gives."""
    shapes = getattr(cfg.input, "batch_shapes", dict)()
    if set(shapes) <= {"tokens", "targets", "weights", "segment_ids", "positions"}:
        return batch(seed)
    if "advantages" in shapes:
        rollouts = random_batch(seed, ROWS, LENGTH, VOCABULARY)
        return {name: rollouts[name] for name in shapes}
    labels = {"labels": np.arange(ROWS, dtype=np.float32) % 2} if "labels" in shapes else {}
    names = [name for name in shapes if name not in labels]
    rows = {prefix: batch(seed + i) for i, prefix in enumerate(sorted({n.rpartition("_")[0] for n in names}))}
    return {**{name: rows[name.rpartition("_")[0]][name.rpartition("_")[2]] for name in names}, **labels}


def filled(functional):
    """Path -> parameter, filled at random by its path: not one is zero, as initialised adapters and biases would be."""
    return {path: filled_one(path, spec) for path, spec in functional.abstract.items()}


def filled_one(path, spec):
    """One array, by its path."""
    seed = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "little")
    values = np.random.default_rng(seed).normal(size=spec.shape) * 0.2
    return jax.device_put((values + (1.0 if path.endswith("scale") else 0.0)).astype(spec.dtype))


@contextlib.contextmanager
def quick_to_compile():
    """Compiles without most optimizations: what runs once is not worth them."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
