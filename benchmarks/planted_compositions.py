"""Plant faults of composition one at a time, and record whether the properties of `axlearn prove` find them.

    python benchmarks/planted_compositions.py                # all faults; about ten seconds each
    python benchmarks/planted_compositions.py --only cache   # faults whose name contains a word
    python benchmarks/planted_compositions.py --missing      # faults without a result
    python benchmarks/planted_compositions.py --report       # only rewrite the table

`planted_compositions.yaml` lists the faults: a name, a file, a text that occurs in it exactly once, the faulty text, a
tiny config (an experiment with features and settings), the property that must fail, and a part of the layer or tensor
that it must name. Each fault is planted in a copy of the working tree; see `planted_faults.py`. The property must hold for
the same config without the fault.

Results are stored in `results/planted-compositions.json`, and the table in `results/2026-11-27-planted-compositions.md`.
Exit codes: 0 if all faults are found, and the right layers are named, 1 if not.
"""

import argparse
import fcntl
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from planted_faults import ROOT, check_imports, copied_tree, environment, import_libraries, planted
from ruamel.yaml import YAML

FAULTS = ROOT / "benchmarks/planted_compositions.yaml"
RESULTS = ROOT / "benchmarks/results/planted-compositions.json"
TABLE = ROOT / "benchmarks/results/2026-11-27-planted-compositions.md"


@attrs.frozen(kw_only=True)
class Fault:
    """A fault of composition.

    Attributes:
        name: What goes wrong.
        file: File below the root of the repository.
        old: Text that occurs in the file exactly once.
        new: The faulty text.
        checked: Name of the property that must fail.
        layer: Part of the layer or tensor that the property must name.
        experiment: Experiment of the config.
        features: Features of the config.
        settings: Settings of the config.
    """

    name: str
    file: str
    old: str
    new: str
    checked: str
    layer: str
    experiment: str = "quickstart"
    features: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    settings: tuple[str, ...] = attrs.field(default=(), converter=tuple)

    @property
    def request(self) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
        """Experiment, features and settings of the config."""
        return self.experiment, self.features, self.settings


def read_faults() -> list[Fault]:
    """Read the list of faults."""
    entries = YAML(typ="safe").load(FAULTS.read_text("utf-8"))
    names = {"with": "features", "set": "settings", "property": "checked"}
    return [Fault(**{names.get(str(k), str(k)): v for k, v in entry.items()}) for entry in entries]


def read_results() -> dict[str, dict[str, Any]]:
    """Read the results by name of the fault."""
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}


def render_table(faults: Sequence[Fault], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page of results."""
    failed = [f for f in faults if results.get(f.name, {}).get("found")]
    named = [f for f in failed if results[f.name]["named"]]
    clean = [f for f in faults if results.get(f.name, {}).get("clean")]
    rows = [
        f"| {fault.name} | {fault.checked} | {_code(result.get('layer'))} | {_code(result.get('tensor'))} "
        f"| {result.get('error', '')} | {result.get('seconds', 'not run')} |"
        for fault in sorted(faults, key=lambda f: (f.checked, f.name))
        for result in [results.get(fault.name, {})]
    ]
    return "\n".join(
        [
            "# Planted faults of composition\n",
            f"{len(faults)} faults, planted one at a time in a copy of the working tree by",
            "`python benchmarks/planted_compositions.py`. Each is checked with the property of `axlearn prove` that should find",
            "it, on a tiny config that uses the faulty code.\n",
            "| | faults |",
            "|---|---|",
            f"| found | {len(failed)} of {len(faults)} |",
            f"| right layer or tensor named | {len(named)} of {len(faults)} |",
            f"| property holds without the fault | {len(clean)} of {len(faults)} |",
            "",
            "| fault | property | layer | tensor | relative error | seconds |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _code(text: str | None) -> str:
    return f"`{text}`" if text else ""


def check(fault: Fault, tree: Path) -> dict[str, Any]:
    """Check the property of a fault in a fork of this process, which has imported JAX but none of our packages."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            result = _check_here(fault, tree)
        except Exception:  # a property that cannot be checked must be seen in the results
            result = {"crash": traceback.format_exc()[-3000:]}
        with os.fdopen(writing, "w") as stream:
            json.dump(result, stream)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return json.loads(text or '{"crash": "the process ended"}')


def _check_here(fault: Fault, tree: Path) -> dict[str, Any]:
    os.chdir(tree)
    os.environ.update(environment(tree))
    sys.path[:0] = [*os.environ["PYTHONPATH"].split(os.pathsep), str(tree / "tests")]
    proof_cases = importlib.import_module("support.proof_cases")  # of the copied tree

    started = time.monotonic()
    case = proof_cases.case(*fault.request)
    checked = proof_cases.load_property(fault.checked)
    if (reason := checked.skip_reason(case)) is not None:
        return {"skipped": reason}
    outcome = checked.check(case)
    facts = {"error": f"{outcome.error:.2g}", "seconds": round(time.monotonic() - started, 1)}
    if outcome.difference is not None:
        facts |= {k: getattr(outcome.difference, k) for k in ("layer", "tensor", "detail")}
    return {**facts, "holds": outcome.holds}


def examine(fault: Fault, tree: Path, clean: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """Return whether the property fails with a fault and holds without it, and what it names."""
    key = (fault.checked, fault.request)
    if key not in clean:
        clean[key] = check(fault, tree)
    with planted(fault, tree):
        result = check(fault, tree)
    place = f"{result.get('layer', '')} {result.get('tensor', '')}"
    fails = result.get("holds") is False
    without = clean[key]
    return {
        **{k: v for k, v in result.items() if k != "holds"},
        "found": fails,
        "named": fails and fault.layer in place,
        "clean": without.get("holds") is True,
        **({} if without.get("holds") else {"without": without}),
    }


def record(name: str, result: Mapping[str, Any]) -> None:
    """Store the result of a fault. Several processes may do this at the same time."""
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = {**read_results(), name: dict(result)}
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", "utf-8")


def main() -> None:
    """Run the faults that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="faults whose name contains the word"
    )
    parser.add_argument("--missing", action="store_true", help="only faults without a result")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every Nth fault, from the Ith on")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no fault after this time")
    parser.add_argument("--report", action="store_true", help="run nothing; rewrite the table")
    options = parser.parse_args()
    faults, results, end = read_faults(), read_results(), time.monotonic() + 60 * options.minutes
    part, parts = map(int, options.part.split("/"))
    chosen = [f for f in faults[part - 1 :: parts] if not options.only or any(w in f.name for w in options.only)]
    chosen = [] if options.report else [f for f in chosen if not (options.missing and f.name in results)]
    if chosen:
        clean: dict[Any, dict[str, Any]] = {}
        with copied_tree() as tree:
            check_imports(tree)
            import_libraries(tree)
            for fault in chosen:
                if time.monotonic() > end:
                    break
                result = examine(fault, tree, clean)
                record(fault.name, result)
                words = [w for w in ("found", "named", "clean") if result[w]]
                place = f"{result.get('layer', '')} {result.get('tensor', '')} {result.get('skipped', '')}"
                print(f"{fault.name}: {' '.join(words) or 'not found'}: {place} {result.get('crash', '')}", flush=True)
    results = read_results()
    TABLE.write_text(render_table(faults, results), "utf-8")
    sys.exit(any(not results.get(f.name, {}).get(key) for f in faults for key in ("found", "named", "clean")))


if __name__ == "__main__":
    main()
