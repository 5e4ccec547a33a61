"""Host overhead per step, with a model that computes next to nothing: `axlearn train`'s loop compared with plain JAX.

    uv run python benchmarks/host_work.py [--rounds 20] [--steps 200] [--profile] [--json]

Ours is a complete run: `Trainer.run` with its default trackers, phase clock, loss checks and checkpointer. The baseline
is a hand-written loop around `baselines/handwritten_llama.py` with `jax.jit`, `jax.device_put`, and a line with the
loss every ten steps. Both have the same dimensions, optimizer and NumPy batches and run in one process: the input of
our run executes windows of the baseline between its own. Reports the ratio of seconds per step, ours over plain: the
median over neighboring windows with its 95% bootstrap interval. `alone` is the compiled step with its batch on the
device.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from framework_tax import by_hand, interval, ours

from axlearn_core import patch
from axlearn_core.config import REQUIRED, Configurable, interface, node
from axlearn_core.run.record import RunDir
from axlearn_core.train.trackers import JsonlTracker, LinesTracker
from axlearn_core.train.trainer import Trainer

DIMS = by_hand.Dims(1, 16, 2, 2, 32, 64)
BATCH, SEQ = 2, 16


def batches():
    """Return prebuilt tokens and targets, to exclude the cost of building batches."""
    rng = np.random.default_rng(0)
    ready = [rng.integers(0, DIMS.vocab, (BATCH, SEQ), dtype=np.int32) for _ in range(64)]
    return [{"tokens": tokens, "targets": np.roll(tokens, -1, 1)} for tokens in ready]


class Plain:
    """The hand-written loop, one window at a time."""

    def __init__(self):
        step, _, _, init = by_hand.build(DIMS, BATCH, SEQ, stack="unrolled")
        self.step = jax.jit(step, donate_argnums=(0, 1))
        self.state = jax.jit(init)(jax.random.key(0))
        self.batches, self.position = batches(), 0
        self.lines = []

    def window(self, steps):
        """Return the seconds per step."""
        (params, opt_state), position = self.state, self.position
        start = time.perf_counter()
        for _ in range(steps):
            tokens = jax.device_put(self.batches[position % len(self.batches)]["tokens"])
            params, opt_state, loss = self.step(params, opt_state, tokens)
            position += 1
            if position % 10 == 0:
                self.lines.append(f"step {position}: loss {float(loss):.4f}")
        jax.block_until_ready(loss)
        seconds = (time.perf_counter() - start) / steps
        self.state, self.position = (params, opt_state), position
        return seconds

    def alone(self, steps=300):
        """Return the seconds per step of the compiled function alone."""
        tokens = jax.device_put(self.batches[0]["tokens"])

        def call(state):
            return self.step(*state, tokens)[:2]

        return best_of(call, jax.tree.map(lambda x: x.copy(), self.state), steps)


class Alternating:
    """Batches of our run. The baseline runs a window between two windows of our run."""

    def __init__(self, plain, steps):
        self.plain, self.steps = plain, steps
        self.batches, self.position = batches(), 0
        self.pairs, self.since = [], None

    def __next__(self):
        if self.position and self.position % self.steps == 0:
            seconds = None if self.since is None else (time.perf_counter() - self.since) / self.steps
            other = self.plain.window(self.steps)
            if seconds is not None:
                self.pairs.append((seconds, other))
            self.since = time.perf_counter()
        self.position += 1
        return self.batches[self.position % len(self.batches)]

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]

    def close(self):
        pass


class AlternatingInput(Configurable):
    """The input of our run."""

    current: Alternating

    @node
    class Config(Configurable.Config["AlternatingInput"]):
        """Settings of `AlternatingInput`. There are none."""

        vocab_size: int = interface(default=REQUIRED)

    def __init__(self, cfg):
        pass

    def train(self):
        return self.current

    def evaluation(self):
        return iter(())

    def describe(self):
        return {"kind": "alternating"}


def best_of(call, state, steps):
    """Return the seconds per call of the fastest of five windows."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(steps):
            state = call(state)
        jax.block_until_ready(state)
        seconds.append((time.perf_counter() - start) / steps)
    return min(seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200, help="of a window")
    parser.add_argument("--profile", action="store_true", help="print a profile of our run instead (cProfile)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    plain = Plain()
    plain.window(50)
    AlternatingInput.current = source = Alternating(plain, args.steps)
    program, batch = ours(DIMS, BATCH, SEQ, "unrolled", "xla")
    config = patch(
        program.config,
        {
            "input": AlternatingInput.Config(),
            "evaluators": {},
            "trackers": (LinesTracker.Config(), JsonlTracker.Config()),
            "max_steps": args.steps * (args.rounds + 2),
        },
    )
    trainer = Trainer(config)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as null:
        run_dir = RunDir.check(Path(folder) / "run", config, None, allow_drift=False)
        stdout, sys.stdout, stderr, sys.stderr = sys.stdout, null, sys.stderr, null
        try:
            if args.profile:
                import cProfile

                profile = cProfile.Profile()
                profile.runcall(trainer.run, run_dir)
            else:
                trainer.run(run_dir)
        finally:
            sys.stdout, sys.stderr = stdout, stderr
    if args.profile:
        profile.print_stats("tottime")
        return
    pairs = source.pairs[1:]
    ratio, low, high = interval([seconds / other for seconds, other in pairs])
    executable = program.compile("train", batch)
    device = program.put(source.batches[0])
    result = {
        "ratio": ratio,
        "ratio_95": [low, high],
        "step_microseconds": 1e6 * median(seconds for seconds, _ in pairs),
        "plain_microseconds": 1e6 * median(other for _, other in pairs),
        "alone_microseconds": 1e6 * best_of(lambda state: executable(state, device)[0], program.init(0), 300),
        "plain_alone_microseconds": 1e6 * plain.alone(),
        "jax": jax.__version__,
    }
    print(json.dumps(result) if args.json else "\n".join(f"{k}: {v}" for k, v in result.items()))


if __name__ == "__main__":
    main()
