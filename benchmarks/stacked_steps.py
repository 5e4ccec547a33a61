"""Compare the steps of an engine that reads stacked weights with those of an engine that reads separate layers.

    python benchmarks/stacked_steps.py [--width 640] [--layers 7] [--rounds 9]

Both engines serve a dense float32 model (58 million parameters by default) on one CPU device. Each round times an update of the
weights, a decoding step of 1, 8 and 64 requests and a step of 448 prompt tokens in both engines, one after the other. Figures are
medians over the rounds, and ratios are medians of each round's ratio. The report also counts the instructions of the compiled
decoding step that copy or slice an array with at least as many elements as the smallest weight of a layer.
"""

import argparse
import functools
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from weight_sync import experiment

from axlearn_core.compose import ModelWeights, compose
from axlearn_core.config import patch
from axlearn_plugins_serving.contracts import Row, Sampling
from axlearn_plugins_serving.runner import ModelRunner

MODES = ("separate", "stacked")
ROWS, CHUNK, CHUNKS, CONTEXT = 64, 32, 14, 256
SIZES: Mapping[str, Any] = {
    "block_size": 16, "max_rows": ROWS, "max_context": CONTEXT, "chunk": CHUNK, "max_step_tokens": CHUNK * CHUNKS,
    "row_buckets": (1, 8), "chunk_buckets": (CHUNKS,),
}  # fmt: skip


def build_runner(cfg: Any, program: Any, model: Any, layers: str) -> ModelRunner:
    """Build a runner in which `ROWS` requests have slots."""
    runner: ModelRunner = patch(ModelRunner.Config(), {**SIZES, "layers": layers}).build(model=model, program=program)
    for slot in range(ROWS):
        runner.assign(slot, Sampling(temperature=0.0), slot, [])
    return runner


def request_blocks(runner: ModelRunner, slot: int) -> list[int]:
    """Return the blocks of a request."""
    each = runner.max_blocks_per_request
    return list(range(slot * each, (slot + 1) * each))


def prompt_rows(runner: ModelRunner) -> list[Row]:
    """Return a step with 14 chunks of prompts of two chunks."""
    tokens = np.random.default_rng(0).integers(0, runner.vocab_size, (CHUNKS // 2, 2 * CHUNK)).tolist()
    return [
        Row(slot=slot, tokens=tuple(row), start=0, blocks=request_blocks(runner, slot), sample=True)
        for slot, row in enumerate(tokens)
    ]


def decoding_rows(runner: ModelRunner, count: int) -> list[Row]:
    """Return a step in which `count` requests decode after 128 tokens."""
    return [Row(slot=s, tokens=(7,), start=128, blocks=request_blocks(runner, s), sample=True) for s in range(count)]


def run_step(runner: ModelRunner, rows: Sequence[Row]) -> list[int]:
    """Run a step and return the chosen tokens."""
    return [result.tokens[0] for result in runner.submit(rows).wait()]


def update(runner: ModelRunner, weights: ModelWeights) -> int:
    """Share weights with a runner, wait until they are there, and return the number of bytes that were copied."""
    copied = runner.update_weights(weights, share=True)
    jax.block_until_ready(runner.weights.arrays)
    return copied


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def large_copies(text: str, elements: int) -> dict[str, int]:
    """Count the instructions of a compiled program that copy or slice at least as many elements, by name."""
    counts: dict[str, int] = {}
    for shape, name in re.findall(r"= f32\[([\d,]+)\]\S* (copy|transpose|slice|dynamic-slice)\(", text):
        if np.prod([int(n) for n in shape.split(",")]) >= elements:
            counts[name] = counts.get(name, 0) + 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    cfg = experiment(args.width, args.layers, 1)
    program = compose(cfg, jax.devices())
    state = program.init(0)
    weights, model = program.weights(state), program.model(state)
    runners = {mode: build_runner(cfg.model, program, model, mode) for mode in MODES}
    calls: dict[str, Callable[[ModelRunner], Any]] = {
        "update of the weights": lambda r: update(r, weights),
        **{f"decoding, {n} rows": lambda r, n=n: run_step(r, decoding_rows(r, n)) for n in (1, 8, ROWS)},
        f"{CHUNK * CHUNKS} prompt tokens": lambda r: run_step(r, prompt_rows(r)),
    }
    for mode, runner in runners.items():
        print(f"{mode}: {update(runner, weights) / 1e6:.0f} MB copied", flush=True)
        compiled = runner.program.compile("serve", runner.program.buckets[0])
        print(
            f"  decoding step of one row: {large_copies(compiled.as_text(), args.width**2)}; {memory(compiled)}",
            flush=True,
        )
    print("\n| call | separate, ms | stacked, ms | stacked / separate | same tokens |\n|---|---|---|---|---|")
    for name, call in calls.items():
        results = [call(runner) for runner in runners.values()]
        same = "" if name.startswith("update") else "yes" if results[0] == results[1] else "no"
        times: list[list[float]] = [
            [timed(functools.partial(call, r)) for r in runners.values()] for _ in range(args.rounds)
        ]
        one, two = (1e3 * statistics.median(t) for t in zip(*times, strict=True))
        ratio = statistics.median(b / a for a, b in times)
        print(f"| {name} | {one:.1f} | {two:.1f} | {ratio:.2f} | {same} |", flush=True)


def memory(compiled: Any) -> str:
    """Describe the temporary memory of a compiled program."""
    return f"{compiled.memory_analysis().temp_size_in_bytes / 1e6:.1f} MB of temporaries"


if __name__ == "__main__":
    main()
