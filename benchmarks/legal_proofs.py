"""Prove random legal configs, and record each property that fails: a false alarm, or a fault of the framework.

    python benchmarks/legal_proofs.py --seeds 0..20              # about half a minute each
    python benchmarks/legal_proofs.py --seeds 20..40 --minutes 1

A seed chooses an experiment, up to three features that go together on it, and a dtype. Results are appended to
`results/legal-proofs.jsonl`, one line for each config; configs that are already listed are left out. Exits with code 1 if a
property failed.
"""

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax

from axlearn_core.errors import PluginError, RequestError
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_verify.prove.proof import FAILS, prove

RESULTS = Path(__file__).parent / "results/legal-proofs.jsonl"
MAPPINGS = 30_000
"""Number of memory mappings after which the process starts again. It goes on with the next seed."""
DTYPES = ("float32", "bfloat16")


def use(name: str) -> list[str]:
    """Return the text of `--with` for a feature, and for the features that it needs."""
    cls = registry().feature(name)
    return [f"{name}:{cls.example}" if cls.example else name, *(text for n in cls.needs for text in use(n))]


def choose(seed: int) -> Request:
    """Return the request of a seed."""
    rng = random.Random(seed)
    experiment = rng.choice([entry.name for entry in registry().entries("experiments")])
    names = [entry.name for entry in registry().entries("features")]
    settings = {"model.dtype": rng.choice(DTYPES)}
    texts: list[str] = []
    for name in rng.sample(names, len(names)):
        candidate = list(dict.fromkeys([*texts, *use(name)]))
        if len(candidate) > 3:
            break
        try:
            resolve(experiment, with_=candidate, set=settings)
        except PluginError:
            raise
        except RequestError:
            continue
        texts = candidate
        if len(texts) >= rng.randint(1, 3):
            break
    return Request.from_arguments(experiment, with_=texts, set=settings)


def record(seed: int, minutes: float) -> dict[str, Any]:
    """Prove the config of a seed, and return its line."""
    request = choose(seed)
    begun = time.monotonic()
    line: dict[str, Any] = {"seed": seed, "command": " ".join(request.words)}
    try:
        proof = prove(request, minutes=minutes, seed=seed, seeds=1)
    except PluginError:
        raise
    except RequestError as error:
        return {**line, "error": str(error)}
    counts: dict[str, int] = {}
    for check in proof.checks:
        counts[check.status] = counts.get(check.status, 0) + 1
    return {
        **line,
        "seconds": round(time.monotonic() - begun, 1),
        **counts,
        "failures": {
            c.name: c.reason
            or (f"error {c.outcome.error:.2g}, tolerance {c.outcome.tolerance:.2g}" if c.outcome else "")
            for c in proof.checks
            if c.status == FAILS
        },
    }


def count_mappings() -> int:
    """Return the number of memory mappings of this process. Linux allows 65,530 by default."""
    return Path("/proc/self/maps").read_bytes().count(b"\n")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0..20", metavar="A..B", help="seeds from A up to but not including B")
    parser.add_argument("--minutes", type=float, default=1.0, help="time limit of each proof")
    arguments = parser.parse_args()
    first, _, last = arguments.seeds.partition("..")
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    recorded = {json.loads(line)["seed"] for line in lines}
    failed = any(line.get("failures") or line.get("error") for line in map(json.loads, lines))
    for seed in range(int(first), int(last)):
        if seed in recorded:
            continue
        line = record(seed, arguments.minutes)
        jax.clear_caches()
        failed |= bool(line.get("failures") or line.get("error"))
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
        if count_mappings() > MAPPINGS:  # some stay behind; with too many, LLVM cannot allocate memory
            os.execv(sys.executable, [sys.executable, *sys.argv])
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
