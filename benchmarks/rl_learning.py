"""Compare the time in which reinforcement learning reaches a held-out reward, here and with TRL.

    python benchmarks/rl_learning.py prepare DIR                 # data, the base run and its export
    python benchmarks/rl_learning.py ours DIR --seeds 1 2 3 4 5
    python benchmarks/rl_learning.py trl DIR --seeds 1 2 3 4 5 --python TRL_ENVIRONMENT/bin/python --seconds 600
    python benchmarks/rl_learning.py report DIR

Both train the same weights with the settings of `examples/rl/grpo.yaml`: the same prompts, batch, group size, learning rate and
loss. Seconds count from the start of the process, with imports and compilation. The time of evaluations is included.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "rl"
TARGET = 0.9
EVERY = 10
"""Steps between evaluations."""


def run(*words: str, folder: Path, log: str) -> float:
    """Run a command in a folder and return the time when it started. Its output goes to a file."""
    start = time.time()
    with (folder / log).open("w") as file:
        result = subprocess.run(words, cwd=folder, stdout=file, stderr=subprocess.STDOUT, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{(folder / log).read_text()[-2000:]}")
    return start


def axlearn(*words: str, folder: Path, log: str) -> float:
    """Run the command `axlearn`."""
    return run(str(Path(sys.executable).with_name("axlearn")), *words, folder=folder, log=log)


def prepare(folder: Path) -> None:
    """Write the data, train the base model, and export it."""
    folder.mkdir(parents=True, exist_ok=True)
    run(sys.executable, str(EXAMPLE / "make_data.py"), folder=folder, log="data.log")
    for name in ("base.yaml", "grpo.yaml"):
        (folder / name).write_text((EXAMPLE / name).read_text())
    axlearn("train", "base.yaml", "--run-dir", "runs/base", folder=folder, log="base.log")
    axlearn("checkpoint", "export-hf", "runs/base", "exported", folder=folder, log="export.log")


def train_ours(folder: Path, seed: int) -> None:
    """Train one seed here."""
    run_dir = f"runs/ours-{seed}"
    settings = [f"seed={seed}", f"evaluators.eval.every_steps={EVERY}"]
    words = [word for setting in settings for word in ("--set", setting)]
    start = axlearn("train", "grpo.yaml", "--run-dir", run_dir, *words, folder=folder, log=f"ours-{seed}.log")
    rows = [json.loads(line) for line in (folder / run_dir / "metrics.jsonl").read_text().splitlines()]
    # The clock of the run starts after the imports. The process ends soon after the last line.
    before = time.time() - start - rows[-1]["elapsed_seconds"]
    points = [
        {"step": row["step"], "seconds": row["elapsed_seconds"] + before, "reward": row["eval_reward"]}
        for row in rows
        if "eval_reward" in row
    ]
    (folder / f"ours-{seed}.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))


def train_trl(folder: Path, seed: int, python: str, seconds: float, continuous: bool) -> None:
    """Train one seed with TRL."""
    config: dict[str, Any] = yaml.safe_load((folder / "grpo.yaml").read_text())
    feature, values = config["features"][0]["grpo"], config["set"]
    schedule = values["learner.optimizer"]["learning_rate"]
    out = folder / f"trl-{seed}.jsonl"
    out.unlink(missing_ok=True)
    settings = {
        **{name: feature[name] for name in ("batch_size", "group_size", "max_tokens")},
        "model": str(folder / "exported"),
        "train": str(folder / "data/train.jsonl"),
        "held_out": str(folder / "data/held_out.jsonl"),
        "folder": str(folder / f"trl-{seed}"),
        "out": str(out),
        "steps": values["max_steps"],
        "learning_rate": schedule["peak"],
        "schedule": {
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            "warmup_steps": schedule["warmup_steps"],
        },
        "entropy": values.get("objective.entropy_bonus", 0.0),
        "continuous": continuous,
        "threads": 2,
        "seed": seed,
        "every": EVERY,
        "target": TARGET,
        "seconds": seconds,
    }
    (folder / f"trl-{seed}.json").write_text(json.dumps(settings))
    script = str(ROOT / "benchmarks/baselines/trl_learning.py")
    run(python, script, f"trl-{seed}.json", folder=folder, log=f"trl-{seed}.log")


def report(folder: Path) -> None:
    """Print the seconds and the steps to the target for each seed, and the medians."""
    for name in ("ours", "trl"):
        reached = []
        for path in sorted(folder.glob(f"{name}-*.jsonl")):
            points = [json.loads(line) for line in path.read_text().splitlines()]
            first = next((p for p in points if p["reward"] >= TARGET), None)
            best = max(p["reward"] for p in points)
            reached.append(first["seconds"] if first else float("inf"))
            end = points[-1]
            when = "not reached" if first is None else f"{first['seconds']:.0f} s, step {first['step']}"
            last = f"{end['reward']:.3f} at step {end['step']}, {end['seconds']:.0f} s"
            print(f"{path.stem}: {when}; best {best:.3f}; last {last}")
        if reached:
            print(f"{name}: median {statistics.median(reached):.0f} s of {len(reached)} seeds")


def main() -> None:
    """Run a part of the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["prepare", "ours", "trl", "report"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--python", default="python", help="Python of TRL's environment")
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit of each run of TRL")
    parser.add_argument("--continuous", action="store_true", help="let TRL generate with continuous batching")
    args = parser.parse_args()
    folder = args.folder.resolve()
    if args.part == "prepare":
        prepare(folder)
    elif args.part == "report":
        report(folder)
    for seed in args.seeds if args.part in ("ours", "trl") else ():
        if args.part == "ours":
            train_ours(folder, seed)
        else:
            train_trl(folder, seed, args.python, args.seconds, args.continuous)


if __name__ == "__main__":
    main()
