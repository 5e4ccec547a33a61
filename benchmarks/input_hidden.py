"""Check whether the step hides the input: steps on real data compared with steps on one repeated batch.

    uv run python benchmarks/input_hidden.py [--rounds 8] [--steps 20] [--json]

Windows of steps alternate between the two. Reports the ratio of seconds per step (real / repeated): the median over
pairs of neighboring windows with its 95% bootstrap interval.
"""

import argparse
import json
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from framework_tax import interval

from axlearn_core import compose, resolve


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    config = resolve("quickstart").config
    program = compose(config)
    batches = config.build_input(config.input, None).train()
    state = program.init(0)
    repeated = program.put(next(batches))
    program.compile("train", repeated)

    def window(real):
        nonlocal state
        start = time.perf_counter()
        for _ in range(args.steps):
            state, scalars = program.train_step(state, program.put(next(batches)) if real else repeated)
        jax.block_until_ready((state, scalars))
        return (time.perf_counter() - start) / args.steps

    window(real=True)
    ratios, seconds = [], []
    for i in range(args.rounds):
        order = (True, False) if i % 2 else (False, True)
        measured = {real: window(real) for real in order}
        ratios.append(measured[True] / measured[False])
        seconds.append(measured[False])
    batches.close()
    median, low, high = interval(ratios)
    result = {"ratio": median, "ratio_95": [low, high], "step_seconds": sorted(seconds)[len(seconds) // 2]}
    if args.json:
        print(json.dumps(result))
    else:
        print(
            f"real data / repeated batch: {median:.4f}  95% [{low:.4f}, {high:.4f}]; step {result['step_seconds']:.4f} s"
        )


if __name__ == "__main__":
    main()
