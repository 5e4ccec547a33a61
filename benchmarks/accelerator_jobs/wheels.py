"""Collect the wheels that a GPU machine needs: ours, and their requirements that its image lacks.

    uv run python benchmarks/accelerator_jobs/wheels.py DIR

Copy DIR to the machine, which needs no network: `python benchmarks/accelerator.py --wheels DIR`. `image.txt` next to
this file lists the packages of the image. The versions are compatible with them.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMAGE = Path(__file__).with_name("image.txt")
PYTHON = "3.12"
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
EXTRAS = ("axlearn-plugins-gpu[kernels]",)
LEFT_OUT = {
    # tokamax imports xprof only to read its own profiles.
    "cheroot", "duckdb", "gcsfs", "google-cloud-storage", "gviz-api",
    # Compilers for other hardware. The image has its own CUDA compilers.
    "jax-cuda12-plugin", "jax-cuda12-pjrt", "libtpu", "nvidia-cuda-runtime-cu12",
}  # fmt: skip
"""Large requirements that the benchmark never imports."""
UNUSED = ("axlearn_plugins_cloud", "axlearn_plugins_cpu", "axlearn_plugins_rl", "axlearn_plugins_serving")
"""Our distributions that the benchmark does not use. Two have many requirements, and one builds a library for this machine."""


def normalize(name: str) -> str:
    """Return a distribution's normalized name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def image_packages() -> set[str]:
    """Return the names of the packages in the image."""
    lines = (line.split("#")[0].strip() for line in IMAGE.read_text().splitlines())
    return {normalize(re.split(r"[=<>!~;\[ ]", line)[0]) for line in lines if line}


def call(*command: str, cwd: str | None = None) -> str:
    """Run a command. Exit with its output if it fails."""
    process = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    if process.returncode:
        sys.exit(f"{' '.join(command)[:300]} exited with {process.returncode}\n{process.stderr[-3000:]}")
    return process.stdout


def build(folder: Path) -> None:
    """Build the wheels of this repository's distributions."""
    call("uv", "build", "-q", "--wheel", "--all-packages", "-o", str(folder), cwd=str(ROOT))
    for wheel in folder.glob("*.whl"):
        if wheel.name.split("-")[0] in UNUSED:
            wheel.unlink()


def requirements(folder: Path) -> list[str]:
    """Return `name==version` of each requirement of ours that the image lacks."""
    ours = sorted(w.name.split("-")[0].replace("_", "-") for w in folder.glob("axlearn_*.whl"))
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "wanted.in"
        file.write_text("\n".join([*ours, *EXTRAS]) + "\n")
        without = Path(scratch) / "without.txt"
        without.write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in sorted(LEFT_OUT)))
        options = ("--python-version", PYTHON, "--python-platform", "x86_64-manylinux_2_28", "--no-annotate", "-q")
        words = ("--find-links", str(folder), "-c", str(IMAGE), "--override", str(without), str(file))
        # Run outside the workspace, because it pins another version of JAX.
        text = call("uv", "pip", "compile", *options, "--no-header", *words, cwd=scratch)
    present = image_packages()
    lines = [line.split(";")[0].strip() for line in text.splitlines() if "==" in line]
    return [r for r in lines if normalize(r.split("==")[0]) not in present and not r.startswith("axlearn-")]


def download(folder: Path, names: list[str]) -> None:
    """Download wheels for the image's Python version."""
    options = ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", "-q"]
    options += [part for platform in PLATFORMS for part in ("--platform", platform)]
    call(
        "uv",
        "run",
        "-q",
        "--no-project",
        "--with",
        "pip",
        "python",
        "-m",
        "pip",
        "download",
        *options,
        "-d",
        str(folder),
        *names,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder = parser.parse_args().folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.whl"):
        stale.unlink()
    build(folder)
    names = requirements(folder)
    download(folder, names)
    size = sum(w.stat().st_size for w in folder.glob("*.whl"))
    print(f"{len(list(folder.glob('*.whl')))} wheels, {size / 2**20:.0f} MiB: ours, and {', '.join(names)}")


if __name__ == "__main__":
    main()
