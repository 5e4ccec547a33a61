"""Check muP: do activations keep their size, and learning rates their best value, when the width grows?

    python benchmarks/mup.py coordinates [--models dense,moe] [--optimizer adamw] [--widths 64,128,256,512] [--seeds 5]
    python benchmarks/mup.py rates [--widths 128,256,512,1024] [--steps 60] [--seeds 2]

`coordinates` trains five steps at each width. For each activation tag, it fits the slope of the log RMS against the log width, with
and without the feature `mup`, and prints the smallest and the largest slope of the steps. The row of the logits is about their
change since the start, because wider models begin with smaller logits. `rates` prints the final loss for each width and learning
rate.
"""

import argparse
import os
import time
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.compose import Functional
from axlearn_core.kernels import selection
from axlearn_core.nn import remat
from axlearn_core.plugins.resolve import resolve

MODELS = {
    "dense": [],
    "moe": ["moe"],
    "mla": ["mla"],
    "gated-delta-net": ["gated-delta-net"],
    "kimi-delta-attention": ["kimi-delta-attention"],
    "mamba2": ["mamba2"],
    "tied": [],
}
RATES = {"adamw": 2.0**-8, "adam": 2.0**-8, "lion": 2.0**-10, "muon": 2.0**-7}
VOCABULARY, ROWS, LENGTH = 256, 4, 64


def experiment(model, optimizer, width, rate, *, base_width, layers=2):
    """Return the config of a small model. Without a base width, it does not use muP."""
    small = {
        "model.vocab_size": VOCABULARY,
        "model.decoder.num_layers": layers,
        "model.decoder.hidden_dim": width,
        "model.decoder.layer.attention.output.init.scale": 1.0,
        "learner.optimizer.learning_rate": rate,
    }
    if optimizer in ("adamw", "muon"):
        small["learner.optimizer.weight_decay"] = 0.0
    feed_forward = [] if model == "moe" else ["model.decoder.layer.feed_forward.down.init.scale"]
    small |= dict.fromkeys(feed_forward, 1.0)
    if model in ("gated-delta-net", "kimi-delta-attention", "mamba2"):
        small = {k: v for k, v in small.items() if ".attention." not in k}
    if model == "tied":
        small |= {"model.decoder.head": None}
    features = [*MODELS[model], f"optimizer:component={optimizer}"]
    if base_width is not None:
        features.append(f"mup:base_width={base_width}")
    scaled = {"type": "scaled", "factor": 2.0}
    pattern = "model.decoder.layer.feed_forward.hidden_dim"
    return resolve("quickstart", with_=features, set={**small, pattern: scaled}).config


class Run:
    """A model and its learner, with compiled functions.

    Attributes:
        functional: The model.
        learner: Its learner.
    """

    def __init__(self, config, steps):
        self.functional = Functional.from_config(config.model)
        self.learner = config.learner.build(max_steps=steps, axes=self.functional.axes)
        self._init = jax.jit(self.functional.init_arrays)
        self._step, self._observe = jax.jit(self._update), jax.jit(self._measure)

    def _update(self, params, variables, state, batch, factor):
        """Take a step. Without weight decay, updates are proportional to the learning rate, which `factor` multiplies."""
        key, before = jax.random.key(0), params

        def loss(params, variables, batch, key):
            model = self.functional.bind(params, variables, key)
            value, summaries = model.loss(batch)
            return value, (summaries, self.functional.extract_variables(model))

        with selection.use(selection.Selection(platform="cpu")):
            (value, (_, _)), grads = jax.value_and_grad(loss, has_aux=True)(params, variables, batch, key)
        params, state, _ = self.learner.update(grads, state, params, value)
        return jax.tree.map(lambda old, new: old + factor * (new - old), before, params), state, value

    def _measure(self, params, variables, batch):
        """Return the RMS of each tagged activation, and the logits."""
        sizes = {}

        def record(x, name):
            sizes.setdefault(name, []).append(jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)))))
            return x

        with selection.use(selection.Selection(platform="cpu")), mock.patch.object(remat, "checkpoint_name", record):
            model = self.functional.bind(params, variables)
            hidden, _ = model.hidden_states(batch)
            logits = model.logits(hidden)
        return {name: jnp.stack(values) for name, values in sizes.items()}, logits

    def coordinates(self, seed, batches):
        """Train on the batches. Return the log RMS of each activation after each step."""
        params, variables = self._init(jax.random.key(seed))
        state = self.learner.init(params)
        first, rows = None, []
        for batch in batches:
            params, state, _ = self._step(params, variables, state, batch, 1.0)
            if first is None:
                _, first = self._observe(*self._init(jax.random.key(seed)), batches[0])
            sizes, logits = self._observe(params, variables, batches[0])
            sizes["logits"] = jnp.sqrt(jnp.mean(jnp.square(logits - first)))[None]
            rows.append({name: np.log(np.asarray(value)) for name, value in sizes.items()})
        return rows

    def final_loss(self, seed, batches, factor):
        """Train on the batches, with the learning rate times `factor`.

        Return the mean loss of the last tenth, or infinity if it is not finite.
        """
        params, variables = self._init(jax.random.key(seed))
        state, losses = self.learner.init(params), []
        for batch in batches:
            params, state, loss = self._step(params, variables, state, batch, factor)
            losses.append(float(loss))
        last = float(np.mean(losses[-max(1, len(losses) // 10) :]))
        return last if np.isfinite(last) else float("inf")


def draw_batches(count, seed):
    """Return batches of a language with order 1: each token has four likely successors."""
    rng = np.random.default_rng(1000 + seed)
    successors = np.random.default_rng(7).integers(0, VOCABULARY, (VOCABULARY, 4))
    batches = []
    for _ in range(count):
        tokens = np.zeros((ROWS, LENGTH + 1), np.int32)
        tokens[:, 0] = rng.integers(0, VOCABULARY, ROWS)
        for i in range(LENGTH):
            tokens[:, i + 1] = successors[tokens[:, i], rng.integers(0, 4, ROWS)]
        batches.append({"tokens": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:])})
    return batches


def fit_slopes(model, optimizer, widths, seeds, *, base_width, steps=5):
    """Return the slope of the log RMS against the log width after each step, by activation: {name: [slope, ...]}."""
    sizes = {}
    for width in widths:
        run = Run(experiment(model, optimizer, width, RATES[optimizer], base_width=base_width), steps)
        for seed in range(seeds):
            rows = run.coordinates(seed, draw_batches(steps, seed))
            for step, row in enumerate(rows):
                for name, value in row.items():
                    sizes.setdefault((name, step), {}).setdefault(width, []).append(value.mean())
        jax.clear_caches()
    slopes = {}
    for (name, _), by_width in sizes.items():
        means = [np.mean(by_width[width]) for width in widths]
        slopes.setdefault(name, []).append(float(np.polyfit(np.log(widths), means, 1)[0]))
    return slopes


def show_coordinates(models, optimizers, widths, seeds, base_width):
    for optimizer in optimizers:
        for model in models:
            start = time.perf_counter()
            pair = [fit_slopes(model, optimizer, widths, seeds, base_width=b) for b in (base_width, None)]
            print(f"\n{model}, {optimizer}\n\n| activation | with mup | without |\n|---|---|---|")
            for name in pair[0]:
                cells = [f"{min(slopes[name]):+.3f} to {max(slopes[name]):+.3f}" for slopes in pair]
                print(f"| {name} | {' | '.join(cells)} |")
            last = [max(abs(slopes[name][-1]) for name in slopes) for slopes in pair]
            print(f"| largest after the last step | {last[0]:.3f} | {last[1]:.3f} |", flush=True)
            print(f"{time.perf_counter() - start:.0f} s", flush=True)


def show_rates(optimizer, widths, rates, steps, seeds, base_width):
    for base, title in ((base_width, "with mup"), (None, "without")):
        print(f"\n{title}, {optimizer}\n\n| width | {' | '.join(f'{r:.2g}' for r in rates)} | best |")
        print("|---" * (len(rates) + 2) + "|")
        for width in widths:
            run = Run(experiment("dense", optimizer, width, rates[0], base_width=base), steps)
            losses = [
                np.mean([run.final_loss(seed, draw_batches(steps, seed), rate / rates[0]) for seed in range(seeds)])
                for rate in rates
            ]
            best = rates[int(np.argmin(losses))]
            print(f"| {width} | {' | '.join(f'{x:.3f}' for x in losses)} | {best:.2g} |", flush=True)
            jax.clear_caches()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("coordinates", "rates"))
    parser.add_argument("--models", default="dense")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--widths", default="64,128,256,512")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rates", default=",".join(str(2.0**-i) for i in range(10, 3, -1)))
    parser.add_argument("--base-width", type=int)
    args = parser.parse_args()
    widths = [int(width) for width in args.widths.split(",")]
    base = args.base_width or widths[0]
    print(f"jax {jax.__version__}, widths {widths}, base width {base}, {args.seeds} seeds")
    if args.what == "coordinates":
        show_coordinates(args.models.split(","), args.optimizer.split(","), widths, args.seeds, base)
    else:
        rates = [float(rate) for rate in args.rates.split(",")]
        show_rates(args.optimizer, widths, rates, args.steps, args.seeds, base)


if __name__ == "__main__":
    main()
