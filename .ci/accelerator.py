"""Rehearses the benchmark for accelerators in an environment like that of a GPU machine, without CUDA.

Python 3.12, the JAX of such a machine, no workspace: what it lacks is installed from a folder of wheels, without a network. Then
some of the tests run in the same environment, so that the supported versions include this one.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
IMAGE = BENCHMARKS / "accelerator_jobs/image.txt"
TESTS = tuple(
    f"tests/{name}.py"
    for name in (
        "core/compose/test_flops",
        "plugins/gpu/test_choices",
        "plugins/gpu/test_gpus",
        "plugins/gpu/kernels/test_cudnn_attention",
        "plugins/gpu/kernels/test_mosaic",
        "plugins/gpu/kernels/test_tokamax_attention",
    )
)
"""Tests of code that is sensitive to the JAX version: jaxprs, kernels that use private names of JAX, and the GPU compiler."""


def call(title: str, *command: str, show: bool = False, cwd: Path = ROOT, **variables: str) -> None:
    """Runs a command and says how long it took; stops where it fails."""
    inherited = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT")
    }
    start = time.monotonic()
    process = subprocess.run(command, cwd=cwd, env=inherited | variables, capture_output=not show, text=True)
    print(f"{title}: {time.monotonic() - start:.0f} s", flush=True)
    if process.returncode:
        details = "" if show else f"\n{process.stdout[-6000:]}\n{process.stderr[-3000:]}"
        sys.exit(f"{' '.join(command)} exited with {process.returncode}{details}")


def main(python: str) -> None:
    """`python`: an interpreter of 3.12."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        call("wheels", sys.executable, str(BENCHMARKS / "accelerator_jobs/wheels.py"), str(home / "wheels"))
        call("image, its environment", "uv", "venv", "-q", "--python", python, str(home / "image"))
        image = str(home / "image/bin/python")
        # Elsewhere than in the workspace, whose own constraints are those of another JAX.
        call("image, its packages", "uv", "pip", "install", "-q", "--python", image, "-r", str(IMAGE), cwd=home)
        rehearsal = ("--dry-run", "--minutes", "15", "--wheels", str(home / "wheels"), "--out", str(home / "out"))
        call("rehearsal", image, str(BENCHMARKS / "accelerator.py"), *rehearsal)
        make = (
            "import sys; from pathlib import Path; from accelerator_jobs.environment import make_environment as make; "
        )
        make += "make(Path(sys.argv[1]), Path(sys.argv[2]))"
        call("environment", image, "-c", make, str(home / "wheels"), str(home / "tests"), PYTHONPATH=str(BENCHMARKS))
        call("tests", str(home / "tests/bin/python"), "-m", "pytest", *TESTS, show=True)


if __name__ == "__main__":
    main(sys.argv[1])
