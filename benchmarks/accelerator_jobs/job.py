"""Run one job of the benchmark in this process.

    python benchmarks/accelerator_jobs/job.py MODULE:FUNCTION [OPTION ...] --rows FILE --seconds S [--earlier DIR] [--dry-run]

Appends each row to FILE immediately as a line of JSON, so a later failure does not lose it.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # makes `benchmarks` importable from any folder

from accelerator_jobs.context import Context


def prepare_environment(rehearsal: bool) -> None:
    """Set the environment variables that JAX reads at startup."""
    if rehearsal:
        os.environ["JAX_PLATFORMS"] = "cpu"
        # Programs run only a few times, so compile fast instead of optimizing.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
    # Only one process uses the device at a time. Leave some memory for libraries with their own allocators.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("function")
    parser.add_argument("options", nargs="*")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--earlier", type=Path, help="folder with the rows of earlier jobs")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    prepare_environment(args.dry_run)
    module, _, name = args.function.partition(":")
    function = getattr(importlib.import_module(f"accelerator_jobs.{module}"), name)
    function(Context(args.rows, seconds=args.seconds, rehearsal=args.dry_run, earlier=args.earlier), *args.options)


if __name__ == "__main__":
    main()
