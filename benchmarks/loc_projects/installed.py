"""Install projects like `pip install -e`, with their sources on `sys.path` and their metadata in a folder."""

import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from axlearn_core.plugins.registry import registry


@contextmanager
def installed(*projects: Path, site: Path) -> Iterator[None]:
    """Make projects importable and their entry points visible.

    A project is a folder with a pyproject.toml and `src`. The metadata is written to `site`. The modules are unloaded
    at the end.
    """
    paths = [str(site), *(str(p / "src") for p in projects)]
    for root in projects:
        project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
        info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        requires = "".join(f"Requires-Dist: {r}\n" for r in project["dependencies"])
        facts = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        (info / "METADATA").write_text(facts + requires)
        points = project["entry-points"].items()
        lines = (f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in points)
        (info / "entry_points.txt").write_text("".join(lines))
    modules = set(sys.modules)
    sys.path[:0] = paths
    try:
        yield
    finally:
        del sys.path[: len(paths)]
        for name in set(sys.modules) - modules:
            if any(str(getattr(sys.modules[name], "__file__", "")).startswith(p) for p in paths):
                del sys.modules[name]
        registry()
