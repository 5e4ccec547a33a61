"""Plan every published model at its published size, for hardware that it fits on.

    uv run python benchmarks/published_plans.py [--only TEXT]

Each row is a separate `axlearn plan EXPERIMENT --target TARGET --json` process. Nothing runs on the hardware. Prints a
Markdown table. Exits with code 1 if a plan does not fit or fails.
"""

import argparse
import json
import os
import subprocess
import sys
import time

TARGETS = {
    "afm-4.5b": "h100-8x32",
    "apertus-8b": "h100-8x32",
    "bamba-9b": "h100-8x64",
    "command-r-35b": "h100-8x64",
    "command-r7b": "h100-8x32",
    "cwm-32b": "h100-8x32 --with gradient-accumulation:steps=4",
    "deepseek-v2-lite": "h100-8x32",
    "deepseek-v3": "h100-8x256",
    "deepseek-v3.2": "h100-8x256 --with gradient-accumulation:steps=4",
    "dots1": "h100-8x128",
    "ernie4.5-0.3b": "h100-8x32",
    "ernie4.5-21b-a3b": "h100-8x32",
    "exaone4-1.2b": "h100-8x32",
    "exaone4-32b": "h100-8x32",
    "gemma-2b": "h100-8x32",
    "gemma-7b": "h100-8x32",
    "gemma2-2b": "h100-8x32",
    "gemma2-9b": "h100-8x32",
    "gemma3-4b": "h100-8x32",
    "gemma4-26b-a4b": "h100-8x32 --with gradient-accumulation:steps=2",
    "gemma4-31b": "h100-8x32 --with gradient-accumulation:steps=4",
    "glm-5": "h100-8x256 --with gradient-accumulation:steps=4",
    "glm4-9b": "h100-8x32",
    "glm4-9b-0414": "h100-8x32",
    "glm4.5-air": "h100-8x64",
    "glm4.6": "h100-8x128",
    "glm4.7-flash": "h100-8x32",
    "gpt-neox-20b": "h100-8x32",
    "gpt-oss-20b": "h100-8x8 --with gradient-accumulation:steps=4",
    "gpt2-1.5b": "h100-8x4",
    "gpt2-124m": "h100-8x1",
    "granite3.1-3b-a800m": "h100-8x32",
    "granite3.3-2b": "h100-8x32",
    "granite3.3-8b": "h100-8x32",
    "granite4-h-micro": "h100-8x32",
    "granite4-h-tiny": "h100-8x32",
    "helium1-2b": "h100-8x32",
    "hunyuan-7b": "h100-8x32",
    "hunyuan-a13b": "h100-8x32 --set mesh.rules.vocab=[] --with gradient-accumulation:steps=4",
    "k-exaone": "h100-8x256",
    "kimi-k2": "h100-8x512",
    "kimi-linear-48b-a3b": "h100-8x64",
    "lfm2-1.2b": "h100-8x32",
    "lfm2-350m": "h100-8x32",
    "lfm2-700m": "h100-8x32",
    "llama2-70b": "h100-8x64",
    "llama2-7b": "h100-8x32",
    "llama3-8b": "h100-8x32",
    "llama4-maverick": "h100-8x128",
    "llama4-scout": "h100-8x128",
    "minimax-m2": "h100-8x128",
    "ministral-8b": "h100-8x32",
    "ministral3-14b": "h100-8x64",
    "ministral3-3b": "h100-8x32",
    "ministral3-8b": "h100-8x64",
    "minitron-4b": "h100-8x32",
    "mistral-7b": "h100-8x32",
    "mixtral-8x7b": "h100-8x64",
    "nemotron-h-8b": "h100-8x64",
    "olmo-1b": "h100-8x32",
    "olmo-7b": "h100-8x32",
    "olmo-hybrid-7b": "h100-8x32",
    "olmo2-32b": "h100-8x32",
    "olmo2-7b": "h100-8x32",
    "olmo3-7b": "h100-8x32",
    "olmoe-1b-7b": "h100-8x32",
    "phi3-mini": "h100-8x32",
    "phi4": "h100-8x32",
    "pythia-1.4b": "h100-8x32",
    "qwen2-57b-a14b": (
        "h100-8x32 --set mesh.shape.fsdp=64 --set mesh.shape.tensor=4 --with gradient-accumulation:steps=4"
    ),
    "qwen2.5-7b": "h100-8x32",
    "qwen3-30b-a3b": "h100-8x64",
    "qwen3-8b": "h100-8x32",
    "qwen3-next-80b-a3b": "h100-8x32",
    "qwen3.5-35b-a3b": "h100-8x32",
    "qwen3.5-9b": "h100-8x32",
    "seed-oss-36b": "h100-8x64",
    "smollm3-3b": "h100-8x32",
    "solar-open-100b": (
        "h100-8x64 --set mesh.shape.fsdp=256 --set mesh.shape.tensor=2 --with gradient-accumulation:steps=2"
    ),
    "stablelm-3b": "h100-8x32",
    "stablelm2-1.6b": "h100-8x32",
    "starcoder2-3b": "h100-8x32",
    "starcoder2-7b": "h100-8x32",
}
"""A GPU target that fits, with any options that it needs, by experiment."""
TPU_TARGETS = {
    "ernie4.5-0.3b": "tpu-v6e-16",
    "llama2-70b": "tpu-v5p-1024 --set mesh.targets={}",
    "llama2-7b": "tpu-v5p-512 --set mesh.targets={}",
    "llama3-8b": "tpu-v5p-512",
    "qwen3-30b-a3b": "tpu-v5p-1024 --set input.sequence_length=16384",
    "vit-b16": "tpu-v5e-16",
}
"""A TPU target that fits, by experiment."""
UNPLANNED = frozenset(
    """
    gemma3n-e2b gemma3n-e4b gemma4-e2b gemma4-e4b gpt-oss-120b nemotron-nano-9b-v2 nemotron3-nano-30b-a3b
    """.split()  # noqa: SIM905
)
"""Experiments that were not compiled for any target yet."""


def plan(experiment: str, target: str) -> dict:
    """Return the plan from `axlearn plan --json`, with `fits`, or `{"error": ...}` if it fails."""
    command = [sys.executable, "-m", "axlearn_core", "plan", experiment, "--target", *target.split(), "--json"]
    process = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    if process.returncode not in (0, 1) or not process.stdout.startswith("{"):
        return {"error": process.stderr.strip() or f"exit code {process.returncode}"}
    return json.loads(process.stdout)


def line(experiment: str, target: str, result: dict) -> str:
    """Return a row of the table."""
    cells = [f"`{experiment}`", f"`{target}`"]
    if "error" in result:
        return f"| {' | '.join(cells)} | no plan: {result['error'].splitlines()[0]} |"
    gib = 2**-30
    total = sum(result[f"{kind}_bytes"] for kind in ("argument", "temporary", "code"))
    cells += [f"{result['parameters']:,}", f"{total * gib:.1f} of {result['hbm_bytes'] * gib:.1f}"]
    cells += [
        "yes" if result["fits"] else "**no**",
        f"{result['roofline_step_seconds']:.3f}",
        str(result["roofline_bound"]),
    ]
    return f"| {' | '.join(cells)} | {result['compile_seconds']:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help='only rows with this text in "EXPERIMENT TARGET"')
    options = parser.parse_args()
    print(
        "| experiment | target | parameters | GiB of a chip | fits | roofline, s a step | bound by | compiled in, s |"
    )
    print("|---|---|--:|--:|---|--:|---|--:|")
    begin, misfits = time.perf_counter(), 0
    for experiment, target in (*TARGETS.items(), *TPU_TARGETS.items()):
        if options.only not in f"{experiment} {target}":
            continue
        result = plan(experiment, target)
        misfits += not result.get("fits", False)
        print(line(experiment, target, result), flush=True)
    load = ", ".join(f"{n:.1f}" for n in os.getloadavg())
    print(f"\n{time.perf_counter() - begin:.0f} s on {os.cpu_count()} cores; load {load}")
    sys.exit(bool(misfits))


if __name__ == "__main__":
    main()
