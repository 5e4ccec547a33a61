"""Prove the shipped experiments and random legal configs, and record each property that fails.

    python benchmarks/legal_proofs.py shipped 0..20              # the first 20 experiments by name, about a minute each
    python benchmarks/legal_proofs.py random 20..40 --minutes 1  # seeds 20 to 39

A seed chooses an experiment, up to three features that go together on it, and a dtype. A failure is a false alarm or a fault
of the framework. Results are appended to `results/shipped-proofs.jsonl` and `results/random-proofs.jsonl`, one line for each
config; configs that are already listed are left out. Exits with code 1 if a listed config has a property that failed, or one of a
shipped experiment that the time limit kept from running.
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

import attrs

from axlearn_core.compose.devices import configure_devices
from axlearn_core.compose.program import check_program
from axlearn_core.errors import PluginError, RequestError
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import resolve
from axlearn_core.plugins.targets import find_machine
from axlearn_plugins_verify.prove.checks import FAILS, NOT_RUN, SKIPPED
from axlearn_plugins_verify.prove.helper_process import DEVICES
from axlearn_plugins_verify.prove.proof import SEEDS, prove

RESULTS = Path(__file__).parent / "results"
DTYPES = ("float32", "bfloat16")


def use(name: str) -> list[str]:
    """Return the text of `--with` for a feature, and for the features that it needs."""
    cls = registry().feature(name)
    return [f"{name}:{cls.example}" if cls.example else name, *(text for n in cls.needs for text in use(n))]


def choose(seed: int) -> Request:
    """Return the request of a seed."""
    configure_devices(find_machine(f"cpu-{DEVICES}"))
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
            config: Any = resolve(experiment, with_=candidate, set=settings).config
            check_program(attrs.evolve(config, mesh=attrs.evolve(config.mesh, shape={"fsdp": 1})))
        except PluginError:
            raise
        except RequestError:
            continue  # the features do not go together, and the error says so
        texts = candidate
        if len(texts) >= rng.randint(1, 3):
            break
    return Request.from_arguments(experiment, with_=texts, set=settings)


def record(request: Request, minutes: float, seed: int, seeds: int, jobs: int) -> dict[str, Any]:
    """Prove a config, and return its line."""
    begun = time.monotonic()
    line: dict[str, Any] = {"command": " ".join(request.words), **({"jobs": jobs} if jobs > 1 else {})}
    try:
        proof = prove(request, minutes=minutes, seed=seed, seeds=seeds, jobs=jobs)
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
        "skips": {c.name: c.reason for c in proof.checks if c.status == SKIPPED},
    }


def is_wrong(line: dict[str, Any]) -> bool:
    """Return whether a property failed, or whether a config could not be proven."""
    return bool(line.get("failures") or line.get("error"))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", choices=("shipped", "random"), help="configs to prove")
    parser.add_argument("range", metavar="A..B", help="numbers from A up to but not including B")
    parser.add_argument("--minutes", type=float, help="time limit of each proof (default: 5 for shipped, 1 for random)")
    parser.add_argument("--jobs", type=int, default=1, help="processes of each proof (default: 1)")
    arguments = parser.parse_args()
    is_shipped = arguments.configs == "shipped"
    minutes = arguments.minutes or (5.0 if is_shipped else 1.0)
    results = RESULTS / f"{arguments.configs}-proofs.jsonl"
    first, _, last = arguments.range.partition("..")
    names = sorted(entry.name for entry in registry().entries("experiments"))
    numbers = range(int(first), min(int(last), len(names)) if is_shipped else int(last))
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    recorded = {line["command"] if is_shipped else line["seed"] for line in lines}
    for number in numbers:
        if (names[number] if is_shipped else number) in recorded:
            continue
        request = Request.from_arguments(names[number]) if is_shipped else choose(number)
        line = {
            **({} if is_shipped else {"seed": number}),
            **record(request, minutes, 0 if is_shipped else number, SEEDS if is_shipped else 1, arguments.jobs),
        }
        lines.append(line)
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
        os.execv(sys.executable, [sys.executable, *sys.argv])  # memory mappings stay behind; with too many, LLVM fails
    raise SystemExit(any(is_wrong(line) or (is_shipped and line.get(NOT_RUN)) for line in lines))


if __name__ == "__main__":
    main()
