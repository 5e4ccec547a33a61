"""Plant faults of composition one at a time, and record whether `axlearn prove` finds them.

    python benchmarks/planted_compositions.py                    # the property of each fault; about ten seconds each
    python benchmarks/planted_compositions.py --proofs           # whole proofs with other features; one to six minutes each
    python benchmarks/planted_compositions.py --only cache       # faults whose name contains a word
    python benchmarks/planted_compositions.py --missing          # faults without a result
    python benchmarks/planted_compositions.py --report           # only rewrite the table

`planted_compositions.yaml` lists the faults: a name, a file, a text that occurs in it exactly once, the faulty text, a
config that uses the faulty code (an experiment with features and settings), the property that should fail, and a part of
the layer or tensor that a property must name. Each fault is planted in a copy of the working tree; see `planted_faults.py`.

Without options, the property is checked on a tiny copy of the config, with the fault and without. With `--proofs`, the
config gets two or three more features, chosen from `UNRELATED` by a seed. `axlearn prove` checks all properties of this config
on one seed within `PROOF_MINUTES`, and removes features and settings from the first failure. A fault is then

- found if a property fails that holds for the same, smallest request without the fault,
- named if a failure names the right layer or tensor, and
- minimal if at most three features are left, none of which is one of the additional ones.

Results are stored in `results/planted-compositions.json` and `results/planted-compositions-proofs.json`, and the table in
`results/2026-11-27-planted-compositions.md`.
Exit codes: 0 if each fault with a result meets every goal of its table, 1 if not.
"""

import argparse
import fcntl
import importlib
import json
import os
import platform
import random
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
from click import testing
from planted_faults import ROOT, check_imports, copied_tree, environment, import_libraries, planted
from ruamel.yaml import YAML

FAULTS = ROOT / "benchmarks/planted_compositions.yaml"
RESULTS = ROOT / "benchmarks/results/planted-compositions.json"
PROOFS = ROOT / "benchmarks/results/planted-compositions-proofs.json"
TABLE = ROOT / "benchmarks/results/2026-11-27-planted-compositions.md"

UNRELATED = (
    "alibi", "dropout:rate=0.1", "ema", "gradient-accumulation:steps=2", "lora:rank=2", "moe:num_experts=4,top_k=2", "mla",
    "optimizer-precision", "precision:dtype=bfloat16", "prometheus", "remat", "rope:theta=1000", "scan", "schedule-free",
    "sdc-check", "watchdog",
)  # fmt: skip
"""Features that a config of a fault may get in addition."""
PROOF_MINUTES = 5.0  # the default of the command
SEED = 0
CHECKED = {
    "found": "found",
    "named": "right layer or tensor named",
    "clean": "property holds without the fault",
}
"""What counts for a property, with its line in the table."""
PROVEN = {
    "found": "a property fails that holds without the fault",
    "named": "right layer or tensor named",
    "minimal": "at most three features left, and no additional one",
}
"""What counts for a proof, with its line in the table."""


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


def read_results(path: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Read the results of a file by name of the fault."""
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def render_table(
    faults: Sequence[Fault], results: Mapping[str, Mapping[str, Any]], proofs: Mapping[str, Mapping[str, Any]]
) -> str:
    """Return the page of results."""
    measured = [proofs[f.name] for f in faults if f.name in proofs]
    machines = "; ".join(sorted({r["machine"] for r in measured}))
    counts = {key: sum(bool(results.get(f.name, {}).get(key)) for f in faults) for key in CHECKED}
    rows = [
        f"| {fault.name} | {fault.checked} | {_code(result.get('layer'))} | {_code(result.get('tensor'))} "
        f"| {result.get('error', '')} | {result.get('seconds', 'not run')} | {_proof_cells(proofs.get(fault.name))} |"
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
            *(f"| {meaning} | {counts[key]} of {len(faults)} |" for key, meaning in CHECKED.items()),
            "",
            f"{len(measured)} of these faults were also planted by `python benchmarks/planted_compositions.py --proofs` under a",
            "config with two or three more features. `axlearn prove` checked all properties of the config on one seed, for at",
            f"most {PROOF_MINUTES:g} minutes, and then removed what the first failure does not need. Machine: {machines}.\n",
            "| | faults |",
            "|---|---|",
            *(f"| {text} | {sum(bool(r.get(k)) for r in measured)} of {len(measured)} |" for k, text in PROVEN.items()),
            "",
            "The columns after `seconds` belong to the whole proof.\n",
            "| fault | property | layer | tensor | relative error | seconds | added features | properties that failed "
            "| features left | seconds of the proof |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _proof_cells(proof: Mapping[str, Any] | None) -> str:
    if proof is None:
        return " | | | not run"
    lists = [" ".join(map(_code, proof.get("added", ()))), ", ".join(proof.get("failed", ())) or "none"]
    return " | ".join([*lists, " ".join(map(_code, proof.get("left", ()))) or "none", str(proof.get("seconds", ""))])


def _code(text: str | None) -> str:
    return f"`{text}`" if text else ""


def run_forked(tree: Path, call: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Call a function in a fork of this process, which has imported JAX but none of our packages."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            os.chdir(tree)
            os.environ.update(environment(tree))
            sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
            result = call(*arguments)
        except Exception:  # a proof that cannot run must be seen in the results
            result = {"crash": traceback.format_exc()[-3000:]}
        with os.fdopen(writing, "w") as stream:
            json.dump(result, stream)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return json.loads(text or '{"crash": "the process ended"}')


def check(fault: Fault, tree: Path) -> dict[str, Any]:
    """Check the property of a fault."""
    return run_forked(tree, _check_here, fault, tree)


def _check_here(fault: Fault, tree: Path) -> dict[str, Any]:
    sys.path.insert(0, str(tree / "tests"))
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


def add_features(fault: Fault) -> dict[str, Any]:
    """Choose two or three features that can be added to the config of a fault."""
    proof = importlib.import_module("axlearn_plugins_verify.prove.proof")
    errors = importlib.import_module("axlearn_core.errors")
    requests = importlib.import_module("axlearn_core.plugins.request")
    random_numbers = random.Random(f"{SEED} {fault.name}")
    candidates = random_numbers.sample(UNRELATED, len(UNRELATED))
    count, added = random_numbers.choice((2, 3)), list[str]()
    used = {name.partition(":")[0] for name in fault.features}
    for feature in candidates:
        if len(added) == count or feature.partition(":")[0] in used:
            continue
        try:
            features = [*fault.features, *added, feature]
            request = requests.Request.from_arguments(fault.experiment, with_=features, set=fault.settings)
            proof.shrink(proof.resolve_trainer(request).config)
        except errors.AxlearnError:
            continue  # it does not fit the config
        added.append(feature)
    return {"added": added}


def prove(fault: Fault, added: Sequence[str]) -> dict[str, Any]:
    """Prove the config of a fault with additional features."""
    proof = importlib.import_module("axlearn_plugins_verify.prove.proof")
    features = [*fault.features, *added]
    result = proof.prove(
        fault.experiment, with_=features, set=fault.settings, minutes=PROOF_MINUTES, seeds=1, seed=SEED
    )
    reports = importlib.import_module("axlearn_plugins_verify.prove.proof_report")
    return reports.as_json(result)


def check_clean(arguments: Sequence[str]) -> dict[str, Any]:
    """Run a command of `axlearn prove` without the fault, and return its exit code."""
    cli = importlib.import_module("axlearn_core.cli.main").cli
    result = testing.CliRunner().invoke(cli, [*arguments, "--seeds", "1"])
    return {"code": result.exit_code, "output": result.output[-2000:]}


def examine_proof(fault: Fault, tree: Path) -> dict[str, Any]:
    """Plant a fault and prove its config with other features. Return the result of the proof."""
    started = time.monotonic()
    choice = run_forked(tree, add_features, fault)
    if "crash" in choice:
        return choice
    with planted(fault, tree):
        proof = run_forked(tree, prove, fault, choice["added"])
    if "crash" in proof:
        return {**proof, **choice}
    failures = [check for check in proof["checks"] if check["status"] == "FAILS"]
    minimal = proof["minimal"]
    located = [c for c in [minimal and minimal["check"], *failures] if c]
    named = [c for c in located if fault.layer in _place(c)]
    shown = (named or located or [{}])[0]
    clean = run_forked(tree, check_clean, shlex.split(minimal["command"])[1:]) if minimal else {}
    left = minimal["features"] if minimal else []
    others = {feature.partition(":")[0] for feature in choice["added"]}
    return {
        **choice,
        "failed": [check["name"] for check in failures],
        "unfinished": [check["name"] for check in proof["checks"] if check["status"] == "not run"],
        **{key: (shown.get("difference") or {}).get(key, "") for key in ("layer", "tensor", "detail")},
        "reason": shown.get("reason", ""),
        "error": f"{shown['error']:.2g}" if isinstance(shown.get("error"), float) else "",
        "command": minimal["command"] if minimal else "",
        "left": left,
        "complete": bool(minimal and minimal["complete"]),
        "found": bool(failures) and clean.get("code") == 0,
        "named": bool(named),
        "minimal": bool(minimal) and len(left) <= 3 and not others & set(left),
        **({} if clean.get("code") == 0 else {"without": clean}),
        "seconds": round(time.monotonic() - started),
        "machine": describe_machine(),
    }


def _place(check: Mapping[str, Any]) -> str:
    difference = check.get("difference") or {}
    return f"{difference.get('layer', '')} {difference.get('tensor', '')} {check.get('reason', '')}"


def describe_machine() -> str:
    """Return the processor, the number of cores, and the versions."""
    cpu = next(
        (x.partition(":")[2].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), ""
    )
    versions = f"Python {platform.python_version()}, JAX {version('jax')}"
    return f"{os.cpu_count()} cores of {cpu or platform.machine()}, {versions}"


def record(name: str, result: Mapping[str, Any], path: Path) -> None:
    """Store the result of a fault. Several processes may do this at the same time."""
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = {**read_results(path), name: dict(result)}
        path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", "utf-8")


def main() -> None:
    """Run the faults that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="faults whose name contains the word"
    )
    parser.add_argument("--missing", action="store_true", help="only faults without a result")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every Nth fault, from the Ith on")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no fault after this time")
    parser.add_argument("--proofs", action="store_true", help="prove whole configs with other features")
    parser.add_argument("--report", action="store_true", help="run nothing; rewrite the table")
    options = parser.parse_args()
    path, goals = (PROOFS, PROVEN) if options.proofs else (RESULTS, CHECKED)
    faults, results, end = read_faults(), read_results(path), time.monotonic() + 60 * options.minutes
    part, parts = map(int, options.part.split("/"))
    chosen = [f for f in faults[part - 1 :: parts] if not options.only or any(w in f.name for w in options.only)]
    chosen = [] if options.report else [f for f in chosen if not (options.missing and f.name in results)]
    if chosen:
        clean: dict[Any, dict[str, Any]] = {}
        with copied_tree() as tree:
            check_imports(tree)
            import_libraries(tree)
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns about the meshes of a proof
            for fault in chosen:
                if time.monotonic() > end:
                    break
                result = examine_proof(fault, tree) if options.proofs else examine(fault, tree, clean)
                record(fault.name, result, path)
                words = [word for word in goals if result.get(word)]
                place = f"{result.get('layer', '')} {result.get('tensor', '')} {result.get('skipped', '')}"
                print(f"{fault.name}: {' '.join(words) or 'not found'}: {place} {result.get('crash', '')}", flush=True)
    results = read_results(path)
    TABLE.write_text(render_table(faults, read_results(), read_results(PROOFS)), "utf-8")
    sys.exit(any(not result.get(key) for result in results.values() for key in goals))


if __name__ == "__main__":
    main()
