"""Create an environment next to the machine's own, with missing packages from a folder of wheels.

Needs no network. The machine's packages, such as JAX with CUDA and PyTorch, stay visible. They are only replaced if the
folder has a wheel with another version.
"""

import subprocess
import sys
from pathlib import Path


class InstallError(Exception):
    """The wheels cannot be installed."""


def make_environment(wheels: Path, folder: Path) -> str:
    """Create a virtual environment on top of this interpreter's packages and return its interpreter.

    Args:
        wheels: Wheels to install. Their requirements are not resolved.
        folder: Folder of the environment. It is replaced if it exists.

    Raises:
        InstallError: If there are no wheels, or one does not support this interpreter.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise InstallError(
            f"no wheels in {wheels}\n    fix: collect them with `python benchmarks/accelerator_jobs/wheels.py DIR`"
        )
    _call(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder))
    python = str(folder / "bin" / "python")
    site = _call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # This interpreter may belong to a virtual environment. `--system-site-packages` would not show its packages.
    folders = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
    lines = (f"import site; site.addsitedir({p!r})" for p in folders)
    (Path(site) / "packages_of_the_machine.pth").write_text("\n".join(lines) + "\n")
    options = ("--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check", "-q")
    _call(sys.executable, "-m", "pip", "--python", python, "install", *options, *map(str, files))
    return python


def missing_requirements(python: str) -> list[str]:
    """Return the unsatisfied requirements of the installed wheels.

    Lines look like `qwix 0.1.8: needs x>=2, which is not installed`.
    """
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
