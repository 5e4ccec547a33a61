"""Check that log-probabilities do not depend on the batch size, bit for bit, with the feature `batch-invariant`.

    python benchmarks/parity.py [--families dense,moe,mla,lora] [--widths 64,256,1024] [--tokens 4096,65536]
        [--functions score,step] [--devices 1]

Batches of 64 tokens give the expected log-probability of each token. Then one batch computes the same tokens twice:
with `score`, the function of every language model, for one token of each row, and with a step that also computes the
gradient of every parameter, for all tokens. Prints the number of log-probabilities that differ. Exit code 1 if any
differ.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.compose import Array, Function, Functional, ModelWeights
from axlearn_core.compose.functions import Part
from axlearn_core.compose.model_program import ModelProgram
from axlearn_core.config import Node, patch
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.nn.layer import Context
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_transformer.functions import ScoreBucket

SMALL = 64
"""Tokens per batch for the expected log-probabilities."""
FUNCTIONS = ("score", "step")
FAMILIES = {"dense": (), "moe": ("moe",), "mla": ("mla",), "lora": ("lora:target=model.**",)}
"""Family -> features of its model."""


@attrs.frozen
class Result:
    """Number of log-probabilities that differ between a large batch and small batches."""

    function: str
    width: int
    tokens: int
    compared: int
    differing: int
    seconds: float


def model_config(
    width: int, layers: int = 2, vocabulary: int = 1024, *, family: str = "dense", invariant: bool = True
) -> Node[Any]:
    """Return a float32 model with a head size of 64 and, except for `mla`, two query heads per key-value head."""
    heads = max(1, width // 64)
    sizes = {
        "model.vocab_size": vocabulary,
        "model.decoder.num_layers": layers,
        "model.decoder.hidden_dim": width,
        "model.decoder.layer.attention.num_heads": heads,
        "model.decoder.layer.feed_forward.hidden_dim": 2 * width,
    }
    if family != "mla":
        sizes["model.decoder.layer.attention.num_kv_heads"] = max(1, heads // 2)
    features = [*FAMILIES[family], *(["batch-invariant"] if invariant else [])]
    experiment: Any = resolve(patch(resolve("quickstart").config, sizes), with_=features).config
    return experiment.model


def random_weights(functional: Functional, seed: int = 0) -> ModelWeights:
    """Return initial weights, with random numbers instead of the zeros of adapters, so that they have an effect."""
    params, variables = functional.init_arrays(jax.random.key(seed))
    random = np.random.default_rng(seed)
    for path in sorted(path for path in params if path.endswith(".lora_b")):
        params[path] = jnp.asarray(0.1 * random.standard_normal(params[path].shape), params[path].dtype)
    return ModelWeights(params, variables)


def token_scores(model: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the log-probability of each of the targets [B, S]."""
    hidden, _ = model.decoder(tokens, Context())
    logits = model.logits(hidden).astype(jnp.float32)
    return jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)


def declare(functional: Functional) -> Mapping[str, Function]:
    """Declare the functions of a program.

    `tokens` returns log-probabilities. `step` also returns the gradients of their mean.
    """

    def forward(weights: ModelWeights, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        return token_scores(functional.bind(weights.params, weights.variables), tokens, targets)

    def step(weights: ModelWeights, tokens: jax.Array, targets: jax.Array) -> tuple[jax.Array, Any]:
        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            scores = forward(ModelWeights(params, weights.variables), tokens, targets)
            return -jnp.mean(scores), scores

        (_, scores), gradients = jax.value_and_grad(loss, has_aux=True)(weights.params)
        return scores, gradients

    def inputs(shape: tuple[int, int]) -> tuple[Any, ...]:
        axes = ("batch", "sequence")
        return Part.WEIGHTS, Array(shape, jnp.int32, axes), Array(shape, jnp.int32, axes)

    return {
        "tokens": Function(call=forward, inputs=inputs, takes_model=False),
        "step": Function(call=step, inputs=inputs, takes_model=False, differentiates=True),
    }


def compare(
    cfg: Node[Any], tokens: int, length: int, functions: Sequence[str] = FUNCTIONS, devices: int = 1
) -> list[Result]:
    """Compare a batch of `tokens` tokens in rows of `length` with batches of `SMALL` tokens on one device."""
    functional = Functional.from_config(cfg)
    random, shape = np.random.default_rng(0), (tokens // length, length)
    inputs, targets = (random.integers(0, cfg.vocab_size, shape).astype(np.int32) for _ in range(2))  # type: ignore[attr-defined]

    def program(count: int) -> tuple[ModelProgram, ModelWeights]:
        instance = ModelProgram(functional, jax.devices()[:count], Mesh(), declare=lambda _: declare(functional))
        return instance, instance.place(weights)

    weights = random_weights(functional)
    alone, placed = program(1)
    rows = max(1, SMALL // length)
    small = alone.compile("tokens", (rows, length))
    parts = [small(placed, inputs[i : i + rows], targets[i : i + rows]) for i in range(0, len(inputs), rows)]
    expected = np.concatenate([np.asarray(part) for part in parts])
    large, placed = program(devices)
    results = []
    for name in functions:
        if name == "score":
            counted = np.arange(length) == random.integers(0, length, (len(inputs), 1))
            score = large.compile("score", ScoreBucket(*shape, min(128, length)))
            started = time.perf_counter()
            got, reference = np.asarray(score(placed, inputs, targets, counted)[0]), expected[counted]
        else:
            step = large.compile("step", shape)
            started = time.perf_counter()
            got, reference = np.asarray(step(placed, inputs, targets)[0]), expected
        differing = int(np.sum(got.view(np.int32) != reference.view(np.int32)))
        seconds = time.perf_counter() - started
        results.append(Result(name, cfg.decoder.hidden_dim, tokens, got.size, differing, seconds))  # type: ignore[attr-defined]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--widths", default="64,256,1024")
    parser.add_argument("--tokens", default="4096,65536")
    parser.add_argument("--length", type=int, default=64, help="tokens per row (default: 64)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--functions", default=",".join(FUNCTIONS))
    parser.add_argument(
        "--devices", type=int, default=1, help="virtual devices that share the large batch (default: 1)"
    )
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    different = 0
    print(
        "| family | function | width | tokens | log-probabilities | differ | seconds |\n|---|---|---|---|---|---|---|"
    )
    for family, width in itertools.product(args.families.split(","), map(int, args.widths.split(","))):
        cfg = model_config(width, args.layers, args.vocabulary, family=family)
        for tokens in map(int, args.tokens.split(",")):
            for r in compare(cfg, tokens, args.length, args.functions.split(","), args.devices):
                different += r.differing
                row = f"| {r.width} | {r.tokens:,} | {r.compared:,} | {r.differing:,} | {r.seconds:.1f} |"
                print(f"| {family} | `{r.function}` {row}", flush=True)
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
