"""Run the quickstart like a user: seconds to the first step and in total, and the validation loss.

    uv run python benchmarks/quickstart.py [--json]

The validation loss is in nats per byte of the held-out files. It is compared with a byte 5-gram model that is trained
and evaluated on the same files (`ngram.py`).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent


def run(extra):
    """Run the command in a fresh directory and return the measurements."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "axlearn_core", "train", "quickstart", "--run-dir", str(run_dir), *extra],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        first = None
        for line in process.stderr:
            if first is None and line.startswith("step"):
                first = time.perf_counter() - start
            sys.stderr.write(line)
        if process.wait():
            sys.exit(f"the quickstart exited with code {process.returncode}")
        total = time.perf_counter() - start
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = sorted(r["step_seconds"] for r in records if "step_seconds" in r)
    validation = [r for r in records if "eval_nats_per_byte" in r]
    return {
        "first_step_seconds": first,
        "total_seconds": total,
        "median_step_seconds": steps[len(steps) // 2],
        "steps": records[-1]["step"],
        "nats_per_byte": validation[-1]["eval_nats_per_byte"],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("extra", nargs="*", help="further arguments for `axlearn train quickstart`, after --")
    args = parser.parse_args()
    result = run(args.extra)
    counted = subprocess.run(
        [sys.executable, str(HERE / "ngram.py"), "--json"], capture_output=True, text=True, check=True
    )
    result["ngram"] = json.loads(counted.stdout)
    if args.json:
        print(json.dumps(result))
        return
    print(f"first step after {result['first_step_seconds']:.1f} s, whole run {result['total_seconds']:.0f} s")
    print(f"{result['steps']} steps, {result['median_step_seconds']:.3f} s each (median)")
    print(f"validation {result['nats_per_byte']:.4f} nats per byte; by n-gram counts: {result['ngram']}")


if __name__ == "__main__":
    main()
