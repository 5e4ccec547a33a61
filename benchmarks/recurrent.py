"""Compare recurrent layers with attention: a training pass of one layer, and a served hybrid model.

    python benchmarks/recurrent.py [--tokens 2048] [--context 960] [--outputs 128] [--rounds 5] [--seed 7]

Prints medians. The candidates alternate within each round, on prompts that the warm-up did not use:

- layers: seconds of the forward and backward pass of one layer at width 512 with 8 heads, and the ratio to attention;
- serving: output tokens per second of four requests, and the MiB of the caches, for a model of eight layers with attention in all
  of them and in every fourth.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axlearn_core.config import patch
from axlearn_core.kernels import selection
from axlearn_core.nn.layer import Context, Precision
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_recurrent.gated_delta_net import GatedDeltaNet
from axlearn_plugins_recurrent.mamba2 import Mamba2
from axlearn_plugins_serving.local_engine import serve
from axlearn_plugins_transformer.attention import Attention

WIDTH, HEADS = 512, 8
LAYERS = {
    "attention": Attention.Config(num_heads=HEADS, input_dim=WIDTH),
    "gated-delta-net": GatedDeltaNet.Config(num_heads=HEADS, input_dim=WIDTH),
    "kimi-delta-attention": GatedDeltaNet.Config(
        num_heads=HEADS, input_dim=WIDTH, decay_per="element", rank=64, gate_activation="sigmoid"
    ),
    "mamba2": Mamba2.Config(input_dim=WIDTH, inner_dim=WIDTH, state_dim=64),
}
MODEL = {
    "model.decoder.num_layers": 8,
    "model.decoder.hidden_dim": 256,
    "model.decoder.layer.attention.num_heads": 4,
    "model.decoder.layer.feed_forward.hidden_dim": 704,
}
ROWS = 4
MODELS = {"attention": [], "hybrid": ["gated-delta-net:attention_every=4"]}


def training_pass(config, tokens):
    """Return a function that computes the gradients of one layer, and waits for them."""
    graph, state = nnx.split(config.build(rngs=nnx.Rngs(0), precision=Precision()))

    def loss(state, x):
        return jnp.sum(jnp.sin(nnx.merge(graph, state)(x, Context())[0]))

    with selection.use(selection.Selection(platform="cpu")):
        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(state, tokens).compile()
    return lambda x: jax.block_until_ready(step(state, x))


def measure_layers(length, rounds, rng):
    def draw():
        return jnp.asarray(rng.normal(size=(1, length, WIDTH)), jnp.float32)

    passes = {name: training_pass(config, draw()) for name, config in LAYERS.items()}
    for run in passes.values():
        run(draw())
    seconds = {name: [] for name in passes}
    for _ in range(rounds):
        x = draw()
        for name, run in passes.items():
            start = time.perf_counter()
            run(x)
            seconds[name].append(time.perf_counter() - start)
    base = statistics.median(seconds["attention"])
    print(f"| layer, {length} tokens | ms | ratio |\n|---|---|---|")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"| {name} | {median * 1e3:.0f} | {median / base:.2f} |", flush=True)


def measure_serving(context, outputs, rounds, rng):
    config, engines, sizes = patch(resolve("quickstart").config, MODEL), {}, {}
    settings = {"runner.max_rows": ROWS, "runner.max_context": context + outputs, "prefix_cache": False}
    for name, features in MODELS.items():
        model = resolve(config, with_=features).config.model.build(rngs=nnx.Rngs(0))
        engine = engines[name] = serve(model, set=settings)
        sizes[name] = sum(x.nbytes for x in jax.tree.leaves(engine.engine.runner.cache)) / 2**20

    def generate(engine, count):
        prompts = rng.integers(0, model.vocab_size, (ROWS, context)).tolist()
        start = time.perf_counter()
        engine.generate(prompts, max_tokens=count, temperature=0)
        return time.perf_counter() - start

    rates = {name: [] for name in engines}
    for round in range(rounds + 1):
        for name, engine in engines.items():
            prefill = generate(engine, 1)
            seconds = generate(engine, outputs) - prefill
            if round:
                rates[name].append(ROWS * (outputs - 1) / seconds)
    base = statistics.median(rates["attention"])
    print(f"\n| model, {context} tokens of context | output tokens/s | ratio | MiB of caches |\n|---|---|---|---|")
    for name, values in rates.items():
        median = statistics.median(values)
        print(f"| {name} | {median:.0f} | {median / base:.2f} | {sizes[name]:.1f} |", flush=True)
    for engine in engines.values():
        engine.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--context", type=int, default=960)
    parser.add_argument("--outputs", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    measure_layers(arguments.tokens, arguments.rounds, rng)
    measure_serving(arguments.context, arguments.outputs, arguments.rounds, rng)


if __name__ == "__main__":
    main()
