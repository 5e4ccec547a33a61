"""An environment beside the machine's own, with what it lacks installed from a folder of wheels. Needs no network.

The machine's packages (its JAX with CUDA, its PyTorch) stay visible and are not replaced, unless a wheel in the folder has
another version of one.
"""

import subprocess
import sys
from pathlib import Path


class InstallError(Exception):
    """The wheels cannot be installed."""


def make_environment(wheels: Path, folder: Path) -> str:
    """Makes a virtual environment in `folder` over this interpreter's packages. Returns its interpreter.

    Args:
        wheels: all of them are installed, without looking for what they need elsewhere.
        folder: is made anew.

    Raises:
        InstallError: no wheels, or one that does not fit this interpreter.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise InstallError(
            f"no wheels in {wheels}\n    fix: `python benchmarks/accelerator_jobs/wheels.py DIR` collects them"
        )
    _call(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder))
    python = str(folder / "bin" / "python")
    site = _call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # This interpreter may itself be one of a virtual environment, whose packages `--system-site-packages` would not show.
    folders = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
    lines = (f"import site; site.addsitedir({p!r})" for p in folders)
    (Path(site) / "packages_of_the_machine.pth").write_text("\n".join(lines) + "\n")
    options = ("--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check", "-q")
    _call(sys.executable, "-m", "pip", "--python", python, "install", *options, *map(str, files))
    return python


def missing_requirements(python: str) -> list[str]:
    """Lines such as `qwix 0.1.8: needs x>=2, which is not installed`, of all that the wheels brought."""
    return _call(python, "-c", _CHECK).splitlines()


_CHECK = """
import importlib.metadata as m, sys
from packaging.requirements import Requirement
site = next(p for p in sys.path if p.endswith("site-packages"))
for d in m.distributions(path=[site]):
    for line in d.requires or ():
        need = Requirement(line)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            version = m.version(need.name)
        except m.PackageNotFoundError:
            version = None
        if version is None:
            print(f"{d.name} {d.version}: needs {need.name}{need.specifier}, which is not installed")
        elif not need.specifier.contains(version, prereleases=True):
            print(f"{d.name} {d.version}: needs {need.name}{need.specifier}, and {version} is installed")
"""


def _call(*command: str) -> str:
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise InstallError(f"{' '.join(command)[:200]} exited with {process.returncode}\n{process.stderr[-2000:]}")
    return process.stdout
