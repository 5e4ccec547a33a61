"""Time the rollouts of the example `examples/rl` without training.

    python benchmarks/rollout_speed.py RUN TASK.jsonl [--rounds 12] [--set PATH=VALUE ...]

RUN is a base run, and TASK.jsonl has its prompts. Each round samples 16 answers to each of 32 prompts. `--set` changes the engine,
such as `--set runner.max_rows=64`. The processor time of all threads depends less on other jobs than the wall time.
"""

import argparse
import asyncio
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import attrs
import yaml

from axlearn_core.config import patch
from axlearn_plugins_rl.engine_policy import EnginePolicy
from axlearn_plugins_rl.engine_sizes import fit_engine, limit_context
from axlearn_plugins_serving.local_engine import LocalEngine
from axlearn_plugins_serving.open_engine import open_engine

EXAMPLES, GROUP_SIZE, MAX_TOKENS, MAX_CONTEXT = 32, 16, 4, 10


async def roll_out(policy: EnginePolicy, prompts: list[list[int]], first_seed: int) -> list[Any]:
    """Sample a group of answers to each prompt."""
    jobs = [
        policy.sample(prompt, seed=first_seed + GROUP_SIZE * number + sample)
        for number, prompt in enumerate(prompts)
        for sample in range(GROUP_SIZE)
    ]
    return await asyncio.gather(*jobs)


def main() -> None:
    """Print the medians over the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("task", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    args = parser.parse_args()
    settings = {path: yaml.safe_load(value) for path, value in (item.split("=", 1) for item in args.set)}
    cfg = EnginePolicy.Config(max_tokens=MAX_TOKENS)
    engine = limit_context(patch(cfg.engine, settings), MAX_CONTEXT)
    engine = fit_engine(engine, examples=EXAMPLES, group_size=GROUP_SIZE, max_tokens=MAX_TOKENS)
    opened = open_engine(args.run, config=engine)
    assert opened.text is not None
    policy = attrs.evolve(cfg, engine=engine).build(engine=LocalEngine(opened.engine, opened.text), text=opened.text)
    lines = args.task.read_text().splitlines()
    prompts = [opened.text.encode_prompt(json.loads(line)["prompt"]) for line in lines]
    gc.collect()
    gc.freeze()
    walls, processor = [], []
    for number in range(args.rounds):
        begin = number * EXAMPLES % (len(prompts) - EXAMPLES)
        wall, used = time.perf_counter(), time.process_time()
        asyncio.run(roll_out(policy, prompts[begin : begin + EXAMPLES], number * EXAMPLES * GROUP_SIZE))
        walls.append(time.perf_counter() - wall)
        processor.append(time.process_time() - used)
    print(f"rows {opened.engine.limits.rows}, compilations {opened.engine.statistics().compilations}")
    for name, values in (("seconds", walls[2:]), ("processor seconds", processor[2:])):
        print(
            f"{name} per {EXAMPLES * GROUP_SIZE} rollouts: median {statistics.median(values):.3f}, min {min(values):.3f}"
        )


if __name__ == "__main__":
    main()
