"""Startup time of the command line, and speed of a large config tree.

    python benchmarks/startup.py [--runs 15] [--json]

Measures wall-clock time and reports the fastest run, because other load only adds time: `axlearn --help` (at most 0.25
s), `axlearn experiments list` and `axlearn features list` (at most 0.5 s), and building, flattening and diffing the
tree of `llama2-70b` (at most 20 ms each). Exit code 1 if a limit is exceeded.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable

from axlearn_core.config import diff, flatten, patch
from axlearn_core.plugins.registry import registry


def best(function: Callable[[], object], runs: int) -> float:
    """Return the seconds of the fastest call, after one warm-up call."""
    function()
    results = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        results.append(time.perf_counter() - start)
    return min(results)


def command(*words: str) -> Callable[[], object]:
    """Return a call of the command line in a separate process."""
    words = (sys.executable, "-m", "axlearn_core", *words)
    return lambda: subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    build = registry().entry("experiments", "llama2-70b").load()
    tree = build()
    edited = patch(tree, {"model.decoder.num_layers": 4, "max_steps": 3})
    measured = {
        "axlearn --help": (command("--help"), 0.25),
        "axlearn experiments list": (command("experiments", "list"), 0.5),
        "axlearn features list": (command("features", "list"), 0.5),
        "build llama2-70b": (build, 0.02),
        "flatten llama2-70b": (lambda: flatten(tree), 0.02),
        "diff llama2-70b": (lambda: diff(tree, edited), 0.02),
    }
    rows = [
        {"name": name, "seconds": best(call, args.runs), "limit": limit} for name, (call, limit) in measured.items()
    ]
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            print(f"{row['name']:28} {row['seconds'] * 1e3:8.2f} ms   (at most {row['limit'] * 1e3:.0f} ms)")
    sys.exit(any(row["seconds"] > row["limit"] for row in rows))


if __name__ == "__main__":
    main()
