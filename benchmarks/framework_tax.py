"""The framework's overhead: our train step compared with a hand-written one.

    uv run python benchmarks/framework_tax.py [--model 58m] [--pairs 40] [--json]

Both use the same JAX, dimensions, data, optimizer and float32, and run alternately. The hand-written step is
`baselines/handwritten_llama.py`. Reports, for each stack mode, the ratios (ours / by hand) of FLOPs, bytes accessed and
peak memory of the optimized program, and of the step time. The ratio of step times is the median over interleaved pairs
of steps with its 95% bootstrap interval.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent / "baselines"))

import handwritten_llama as by_hand  # needs the path above
import jax
import numpy as np

from axlearn_core import patch, resolve
from axlearn_core.compose import compose

WAYS = {
    "unrolled, blocked attention": ("unrolled", "blocked", "xla-blocked"),
    "scanned, plain attention": ("scan", "xla", "xla"),
}
SMALL = {"2m": by_hand.Dims(4, 192, 4, 4, 512, 2048)}
MODELS = {**by_hand.MODELS, **SMALL}


def ours(dims, batch, seq, mode, kernel):
    """Return our program for the same dimensions."""
    config = resolve("llama2-7b").config
    config = patch(
        config,
        {
            "max_steps": 1000,
            "model.vocab_size": dims.vocab,
            "model.dtype": "float32",
            # XLA counts the body of a loop once. With one chunk, the loss is not a loop, so the counts are comparable.
            "model.loss_chunk": seq,
            "model.decoder.num_layers": dims.layers,
            "model.decoder.hidden_dim": dims.width,
            "model.decoder.stack.mode": mode,
            "model.decoder.stack.remat": None,
            "model.decoder.layer.attention.num_heads": dims.heads,
            "model.decoder.layer.attention.num_kv_heads": dims.kv_heads,
            "model.decoder.layer.attention.kernel": kernel,
            "model.decoder.layer.feed_forward.hidden_dim": dims.hidden,
            "learner.optimizer.learning_rate": 3e-4,
            "learner.optimizer.weight_decay": 0.1,
            "mesh.shape": {},
        },
    )
    program = compose(config, jax.devices()[:1])
    tokens = jax.ShapeDtypeStruct((batch, seq), np.int32)
    return program, {"tokens": tokens, "targets": tokens}


def theirs(dims, batch, seq, mode, attention):
    """Return the compiled hand-written step."""
    step, state, spec, init = by_hand.build(dims, batch, seq, stack=mode, attention=attention)
    return jax.jit(step, donate_argnums=(0, 1)).trace(*state, spec).lower().compile(), init


def cost(compiled):
    """Return the FLOPs, bytes accessed and peak bytes of a compiled program."""
    analysis = compiled.cost_analysis()
    analysis = analysis[0] if isinstance(analysis, list) else analysis
    memory = compiled.memory_analysis()
    peak = (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )
    return {"flops": analysis["flops"], "bytes": analysis["bytes accessed"], "peak_bytes": peak}


def interval(ratios, draws=4000):
    """Return the median of paired ratios and its 95% bootstrap interval."""
    sample = np.random.default_rng(0).choice(ratios, (draws, len(ratios)))
    low, high = np.percentile(np.median(sample, axis=1), [2.5, 97.5])
    return statistics.median(ratios), float(low), float(high)


def measure(dims, batch, seq, pairs, mode, attention, kernel):
    """Return all ratios for one stack mode."""
    program, specs = ours(dims, batch, seq, mode, kernel)
    executable = program.compile("train", specs)
    hand, init = theirs(dims, batch, seq, mode, attention)
    a, b = cost(executable), cost(hand)
    result = {name: a[name] / b[name] for name in a}
    state = program.init(0)
    params, opt_state = jax.jit(init)(jax.random.key(0))
    rng = np.random.default_rng(0)
    times = ([], [])
    for pair in range(pairs + 3):
        tokens = rng.integers(0, dims.vocab, (batch, seq), dtype=np.int32)
        device = program.put({"tokens": tokens, "targets": np.roll(tokens, -1, 1)})
        plain = jax.device_put(tokens)
        for side in (0, 1) if pair % 2 else (1, 0):
            start = time.perf_counter()
            if side == 0:
                state, scalars = executable(state, device)
                jax.block_until_ready((state, scalars))
            else:
                params, opt_state, loss = hand(params, opt_state, plain)
                jax.block_until_ready((params, opt_state, loss))
            if pair >= 3:
                times[side].append(time.perf_counter() - start)
    median, low, high = interval([x / y for x, y in zip(*times, strict=True)])
    return result | {
        "step_time": median,
        "step_time_95": [low, high],
        "step_seconds": statistics.median(times[0]),
        "by_hand_seconds": statistics.median(times[1]),
        "pairs": pairs,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="58m", choices=MODELS)
    parser.add_argument("--batch", type=int, default=2, help="use short steps, for more pairs in the same time")
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = {}
    for title, way in WAYS.items():
        results[title] = measure(MODELS[args.model], args.batch, args.seq, args.pairs, *way)
        if not args.json:
            r = results[title]
            print(f"{title} ({args.model}, batch {args.batch} x {args.seq}, jax {jax.__version__})")
            for name in ("flops", "bytes", "peak_bytes"):
                print(f"  {name:<11} ratio {r[name]:.4f}")
            low, high = r["step_time_95"]
            print(f"  step time   ratio {r['step_time']:.4f}  95% [{low:.4f}, {high:.4f}] over {r['pairs']} pairs")
            print(f"  step time   {r['step_seconds']:.4f} s, by hand {r['by_hand_seconds']:.4f} s")
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
