"""Plant realistic faults in the packages one at a time, and record which tests catch them.

    python benchmarks/planted_faults.py                           # all faults; about a minute each
    python benchmarks/planted_faults.py --only top_p --only mask  # faults whose names contain a word
    python benchmarks/planted_faults.py --missing                 # faults without a result
    python benchmarks/planted_faults.py --report                  # only rewrite the table

`planted_faults.yaml` lists the faults: a name, a file, a text that occurs in it exactly once, the faulty text, and the
tests that could catch the fault. Each fault is planted in a copy of the working tree. Its tests run in the default
selection, and then, if all of them pass, in the slow selection. The first test that fails catches the fault if it passes
without it.

Results are stored in `results/planted-faults.json`, which keeps the result of the first run of each fault as `first`. The
table is in `results/2026-11-27-planted-faults.md`. Exit codes: 0 if tests catch all faults, 1 if not.
"""

import argparse
import fcntl
import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import attrs
import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
FAULTS = ROOT / "benchmarks/planted_faults.yaml"
RESULTS = ROOT / "benchmarks/results/planted-faults.json"
TABLE = ROOT / "benchmarks/results/2026-11-27-planted-faults.md"
SELECTIONS = {"default": "not slow and not exhaustive", "slow": "slow and not exhaustive"}
"""Selections of tests by name, cheapest first."""


class Edit(Protocol):
    """An edit of a file. See `Fault` for the attributes."""

    @property
    def name(self) -> str:
        """What goes wrong."""
        ...

    @property
    def file(self) -> str:
        """File below the root of the repository."""
        ...

    @property
    def old(self) -> str:
        """Text that occurs in the file exactly once."""
        ...

    @property
    def new(self) -> str:
        """The faulty text."""
        ...


@attrs.frozen(kw_only=True)
class Fault:
    """A fault to plant.

    Attributes:
        name: What goes wrong.
        file: File below the root of the repository.
        old: Text that occurs in the file exactly once.
        new: The faulty text.
        tests: Files, folders or IDs of the tests that could catch it, best first.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = attrs.field(converter=tuple)

    @property
    def distribution(self) -> str:
        """Name of the distribution that contains the file."""
        return self.file.partition("/src/")[0].rpartition("/")[2].removeprefix("axlearn_").removeprefix("plugins_")


def read_faults() -> list[Fault]:
    """Read the list of faults."""
    return [Fault(**entry) for entry in YAML(typ="safe").load(FAULTS.read_text("utf-8"))]


def read_results() -> dict[str, dict[str, Any]]:
    """Read the results by name of the fault."""
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}


def render_table(faults: Sequence[Fault], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page of results."""
    rows = [
        f"| {fault.distribution} | {fault.name} | {result.get('by', '')} | {_code(result.get('test'))} |"
        for fault in sorted(faults, key=lambda f: (f.distribution, f.name))
        for result in [results.get(fault.name, {})]
    ]
    totals = [[r.get(key, "not run") for f in faults for r in [results.get(f.name, {})]] for key in ("first", "by")]
    kinds = ("default", "slow", "nothing", "not run")
    counts = [f"| {kind} | {totals[0].count(kind)} | {totals[1].count(kind)} |" for kind in kinds]
    return "\n".join(
        [
            "# Planted faults\n",
            f"{len(faults)} faults in {len({f.distribution for f in faults})} distributions, planted one at a time in a copy",
            "of the working tree by `python benchmarks/planted_faults.py`. They were chosen from the code, without a look at",
            "the tests. For each fault, only the tests that `benchmarks/planted_faults.yaml` names ran, so other tests may",
            "catch it too. The column `first run` counts what the tests caught before some were added or made fast for the",
            "faults that the default suite missed.\n",
            "| caught by | first run | now |",
            "|---|---|---|",
            *counts,
            "",
            "| distribution | fault | caught by | first test that fails |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _code(text: str | None) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`" if text else ""


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Copy the files of the working tree and what was built in its source folders to a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="planted-faults-") as folder:
        listed = [
            _git("ls-files", "-co"),
            [n for n in _git("ls-files", "-oi") if "/src/" in n and ".egg-info/" not in n],
        ]
        for name in (n for names in listed for n in names):
            if (ROOT / name).is_file() and "__pycache__" not in name:
                target = Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        yield Path(folder)


def _git(*arguments: str) -> list[str]:
    command = ["git", *arguments, "--exclude-standard", "-z"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")[:-1]


def environment(tree: Path) -> dict[str, str]:
    """Return an environment in which Python imports the packages of a copied tree."""
    sources = sorted(map(str, [*tree.glob("*/src"), *tree.glob("plugins/*/src")]))
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tree / ".compiled"), "PYTHONDONTWRITEBYTECODE": "1"}
    return {**cache, **os.environ, "PYTHONPATH": os.pathsep.join(sources)}


def check_imports(tree: Path) -> None:
    """Check that Python finds every package in the copied tree.

    Raises:
        SystemExit: If it finds a package somewhere else.
    """
    names = sorted(
        {p.parent.name for p in [*tree.glob("*/src/*/__init__.py"), *tree.glob("plugins/*/src/*/__init__.py")]}
    )
    code = "import importlib.util, sys\nfor n in sys.argv[1:]: print(importlib.util.find_spec(n).origin)"
    command = [sys.executable, "-c", code, *names]
    output = subprocess.run(command, env=environment(tree), cwd=tree, check=True, capture_output=True, text=True).stdout
    if elsewhere := [line for line in output.splitlines() if not line.startswith(f"{tree}/")]:
        raise SystemExit(f"{elsewhere[0]} is imported instead of the copy in {tree}")


@contextmanager
def planted(fault: Edit, tree: Path) -> Iterator[None]:
    """Plant a fault in a tree, and remove it afterwards.

    Raises:
        ValueError: If the text does not occur exactly once.
    """
    path = tree / fault.file
    content = path.read_text("utf-8")
    if content.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: {fault.file} contains its text {content.count(fault.old)} times, expected 1")
    path.write_text(content.replace(fault.old, fault.new), "utf-8")
    try:
        yield
    finally:
        path.write_text(content, "utf-8")


def failures(tree: Path, tests: Iterable[str], selection: str, *options: str) -> list[str]:
    """Run tests and return the IDs of those that fail."""
    common = ["-n", "0", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-m", selection]
    with tempfile.TemporaryFile("w+") as output:
        code = _run_pytest(tree, [*common, *options, *tests], output.fileno())
        output.seek(0)
        text = output.read()
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.+?)?)(?: - .*)?$", text, re.MULTILINE)
    if bool(failed) != (code not in (0, 5)):  # 5: no test is selected
        raise SystemExit(f"pytest exited with code {code}\n{text[-4000:]}")
    return failed


def _run_pytest(tree: Path, arguments: list[str], output: int) -> int:
    """Run pytest in a fork of this process, which has imported JAX but none of our packages. Return its exit code."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 70
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(tree)
        os.environ.update(environment(tree))
        sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
        code = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        os._exit(code)


def import_libraries(tree: Path) -> None:
    """Import what every test imports, with the settings of `tests/conftest.py`, so that forks need not."""
    os.environ.update(environment(tree))
    runpy.run_path(str(tree / "tests/conftest.py"))
    for name in ("flax.nnx", "jax", "optax"):
        importlib.import_module(name)
    warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)


def examine(fault: Fault, tree: Path) -> dict[str, Any]:
    """Return which selection catches a fault, and the first test that fails."""
    with planted(fault, tree):
        for by, selection in SELECTIONS.items():
            if failed := failures(tree, fault.tests, selection, "-x"):
                return {"by": by, "test": failed[0]}
    return {"by": "nothing", "test": None}


def confirm(results: Mapping[str, Mapping[str, Any]], tree: Path) -> None:
    """Check that the tests that caught faults pass without them.

    Raises:
        SystemExit: If a test fails. The results that name it are removed.
    """
    tests = sorted({r["test"] for r in results.values() if r["test"]})
    if tests and (wrong := failures(tree, tests, "not exhaustive")):
        for name in (n for n, r in results.items() if r["test"] in wrong):
            record(name, None)
        raise SystemExit(f"these tests also fail without a fault: {', '.join(wrong)}")


def record(name: str, result: Mapping[str, Any] | None) -> None:
    """Store the result of a fault, or remove it. Several processes may do this at the same time."""
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = read_results()
        old = results.pop(name, {})
        if result is not None:
            results[name] = {"first": old.get("first", result["by"]), **result}
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
    faults, results = read_faults(), read_results()
    part, parts = map(int, options.part.split("/"))
    chosen = [f for f in faults[part - 1 :: parts] if not options.only or any(w in f.name for w in options.only)]
    end = time.monotonic() + 60 * options.minutes
    chosen = [] if options.report else [f for f in chosen if not (options.missing and f.name in results)]
    new: dict[str, dict[str, Any]] = {}
    if chosen:
        with copied_tree() as tree:
            check_imports(tree)
            import_libraries(tree)
            for fault in chosen:
                if time.monotonic() > end:
                    break
                result = new[fault.name] = examine(fault, tree)
                record(fault.name, result)
                print(f"{fault.name}: {result['by']} {result['test'] or ''}", flush=True)
            confirm(new, tree)
    results = read_results()
    TABLE.write_text(render_table(faults, results), "utf-8")
    sys.exit(any(results.get(f.name, {}).get("by", "nothing") == "nothing" for f in faults))


if __name__ == "__main__":
    main()
