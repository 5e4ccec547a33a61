"""Small models with runners, and requests that are computed step by step as in an engine."""

import functools

import jax
import numpy as np
from flax import nnx

from axlearn_core.compose import Functional
from axlearn_core.config import patch
from axlearn_core.plugins.resolve import resolve
from axlearn_core.train.inference import load
from axlearn_plugins_serving.contracts import Row, Sampling
from axlearn_plugins_serving.runner import ModelRunner
from support.paths import HF_FIXTURES

FAMILIES = sorted(p.name for p in HF_FIXTURES.iterdir())
SIZES = {"block_size": 4, "max_rows": 4, "max_context": 48, "max_step_tokens": 24, "chunk": 8}
SMALL = {
    "model.vocab_size": 64,
    "model.decoder.num_layers": 2,
    "model.decoder.hidden_dim": 64,
    "model.decoder.layer.attention.num_heads": 4,
    "model.decoder.layer.feed_forward.hidden_dim": 64,
}
GREEDY = Sampling(temperature=0.0)


@functools.cache
def config(*features):
    """Return a small quickstart config with features. `num_kv_heads` of dense attention is 2."""
    cfg = resolve(patch(resolve("quickstart").config, SMALL), with_=list(features)).config
    attention = "model.decoder.layer.attention.num_kv_heads"
    return (cfg if "mla" in features else patch(cfg, {attention: 2})).model


@functools.cache
def model(*features):
    return config(*features).build(rngs=nnx.Rngs(0))


@functools.cache
def family(name):
    """Return the fixture of a family in float32. In bfloat16, tokens can differ between shapes of a program."""
    loaded = load(HF_FIXTURES / name).model
    cfg = patch(loaded.cfg, {"dtype": "float32", "param_dtype": "float32"})
    functional = Functional.from_config(cfg)
    weights = jax.tree.map(lambda x: x.astype("float32"), functional.extract_weights(loaded))
    return functional.bind(weights.params, weights.variables)


@functools.cache
def runner(*features, **sizes):
    instance = ModelRunner.Config(**{**SIZES, **sizes}).build(model=model(*features))
    instance.warm_up()
    return instance


class Requests:
    """Requests in a runner, with randomly placed blocks."""

    def __init__(self, runner, prompts, samplings=None, seeds=None, rng=None):
        self.runner, self.rng = runner, rng or np.random.default_rng(0)
        self.prompts, self.outputs = prompts, [[] for _ in prompts]
        self.results = [[] for _ in prompts]
        each = runner.max_blocks_per_request
        free = self.rng.permutation(runner.num_blocks)
        self.blocks = [free[i * each : (i + 1) * each].tolist() for i in range(len(prompts))]
        self.slots = self.rng.permutation(runner.max_rows)[: len(prompts)].tolist()
        self.done = [0] * len(prompts)
        for i, slot in enumerate(self.slots):
            sampling = samplings[i] if samplings else GREEDY
            runner.assign(slot, sampling, seeds[i] if seeds else i, [])

    def row(self, i, size=None, **options):
        """Return the next part of request i: `size` tokens of its prompt, or the last chosen token."""
        base = {"slot": self.slots[i], "blocks": self.blocks[i], "start": self.done[i], **options}
        if self.done[i] >= len(self.prompts[i]):
            return Row(**base)
        tokens = self.prompts[i][self.done[i] :][:size]
        return Row(tokens=tokens, sample=self.done[i] + len(tokens) == len(self.prompts[i]), **base)

    def step(self, sizes, steps=1, **options):
        """Compute a step. `sizes` maps requests to the maximum number of their prompt tokens."""
        rows = [self.row(i, n, **options.get(str(i), {})) for i, n in sizes.items()]
        results = self.runner.submit(rows, steps).wait()
        for i, row, result in zip(sizes, rows, results, strict=True):
            self.done[i] += len(row.tokens) or steps
            self.outputs[i] += result.tokens
            self.results[i].append(result)
        return results

    def random_steps(self, count):
        """Run random steps with prompt parts of any size until all requests have `count` tokens."""
        while unfinished := [i for i, o in enumerate(self.outputs) if len(o) < count]:
            batch = [i for i in unfinished if self.rng.random() < 0.8]
            budget, sizes = self.runner.max_batch_tokens, {}
            for i in batch:
                reading = self.done[i] < len(self.prompts[i])
                size = int(self.rng.integers(1, 14)) if reading else 1
                if size <= budget:
                    sizes[i], budget = size, budget - size
            if sizes:
                self.step(sizes)


def prompts(rng, vocab, lengths=(5, 13, 1, 21)):
    return [rng.integers(0, vocab, n).tolist() for n in lengths]
