"""Run all benchmarks for an accelerator, the most important first.

    python benchmarks/accelerator.py [--minutes 8] [--only PART] [--out DIR] [--wheels DIR] [--dry-run]

Needs a machine with a GPU or a TPU. The parts are kernels, peaks, steps, plan, decode, checkpoint. Each job of a part
runs in a separate process with a time limit, so a failure, a hang or running out of memory only affects that job.
`accelerator.md` and `accelerator.json` in DIR (default: `accelerator-results`) have the current results at any time,
and `log.txt` the output. `--wheels` first installs missing packages from a folder, without a network.
`benchmarks/accelerator_jobs/wheels.py` creates it. `--dry-run` runs every part at toy size on a CPU and marks the
results as a rehearsal.

Exit codes: 0 if everything ran, 1 if a job failed, 2 if the request is invalid. Device settings are not changed.
"""

import argparse
import difflib
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from accelerator_jobs.environment import InstallError, make_environment, missing_requirements
from accelerator_jobs.harness import Run
from accelerator_jobs.jobs import PARTS, Part
from accelerator_jobs.machine import describe, versions
from accelerator_jobs.report import Report

ROOT = Path(__file__).resolve().parent.parent


def select_parts(names: Sequence[str]) -> list[Part]:
    """Return the parts with these names, the most important first. Return all parts if there are no names.

    Raises:
        ValueError: If there is no part with a name.
    """
    part_names = [p.name for p in PARTS]
    for name in names:
        if name not in part_names:
            close = difflib.get_close_matches(name, part_names, n=1, cutoff=0.5)
            hint = f"\n    did you mean: {close[0]}?" if close else ""
            raise ValueError(f"unknown part {name!r}{hint}\n    known: {', '.join(part_names)}")
    return [p for p in PARTS if not names or p.name in names]


def commit() -> str:
    """Return the commit of this clone, and whether files differ from it."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return "unknown: not a clone"
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.strip()
    return head.stdout.strip() + (", with changes" if changed else "")


def kept_programs(folder: Path) -> dict[str, str]:
    """Return settings that let jobs share compiled programs.

    Only for rehearsals, because measurements include the time to compile.
    """
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="total time for all parts")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="can be repeated")
    parser.add_argument("--out", type=Path, default=Path("accelerator-results"))
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install in a separate environment")
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args()


def main() -> int:
    args = parse()
    try:
        parts = select_parts(args.only)
        if args.minutes <= 0:
            raise ValueError(f"--minutes is {args.minutes:g}; expected a positive number")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="axlearn-benchmark-") as folder:
        python, missing = sys.executable, []
        if args.wheels is not None:
            try:
                python = make_environment(args.wheels, Path(folder))
                missing = missing_requirements(python)
            except InstallError as error:
                print(f"error: {error}", file=sys.stderr)
                return 2
        header = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "rehearsal": args.dry_run,
            "command": shlex.join(["python", *sys.argv]),
            "minutes": args.minutes,
            "machine": describe(),
            "versions": versions(python),
            "missing": missing,
            "commit": commit(),
        }
        report = Report(args.out, header)
        report.publish([])
        run = Run(
            out=args.out,
            minutes=args.minutes,
            rehearsal=args.dry_run,
            publish=report.publish,
            python=python,
            environment=kept_programs(Path(folder)) if args.dry_run else {},
        )
        complete = run.run(parts)
    print(report.markdown.read_text(encoding="utf-8"))
    statuses = {job["job"]: job["status"] for part in run.results for job in part["jobs"]}
    print(json.dumps(statuses), file=sys.stderr)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
