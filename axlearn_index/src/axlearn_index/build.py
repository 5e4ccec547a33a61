"""Generate an index from pyproject files: their entry points, and the names in the `tool.axlearn.index` table.

Uses only the standard library, so that a build hook can run it before anything is installed.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PREFIX = "axlearn."
NOT_NAMES = ("plugins", "index")
"""Groups whose entry points are modules, not names that users write."""

Names = dict[str, dict[str, str]]


def workspace_members(root: Path) -> list[Path]:
    """Return the folders of a uv workspace that contain a distribution, sorted by path."""
    patterns = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["uv"]["workspace"]["members"]
    return sorted({f for pattern in patterns for f in root.glob(pattern) if (f / "pyproject.toml").exists()})


def collect_names(folders: Iterable[Path]) -> Names:
    """Return the distribution of each name, as group (`features`, `commands`, `targets`, ...) -> name -> distribution.

    Raises:
        ValueError: If two distributions declare the same name.
    """
    index: Names = {}
    for folder in folders:
        content = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
        distribution = content["project"]["name"]
        for group, names in _declared_names(content).items():
            for name in names:
                owner = index.setdefault(group, {}).setdefault(name, distribution)
                if owner != distribution:
                    raise ValueError(f"{group}: {owner} and {distribution} both declare {name!r}")
    return {group: dict(sorted(index[group].items())) for group in sorted(index)}


def write_index(file: Path, folders: Iterable[Path]) -> None:
    """Write `index.json` for the distributions in some folders."""
    file.write_text(json.dumps(collect_names(folders), indent=1) + "\n", "utf-8")


def _declared_names(content: Mapping[str, Any]) -> dict[str, list[str]]:
    points = content["project"].get("entry-points", {})
    groups = {group.removeprefix(PREFIX): [*names] for group, names in points.items() if group.startswith(PREFIX)}
    names = {group: groups[group] for group in groups if group not in NOT_NAMES}
    for group, more in content.get("tool", {}).get("axlearn", {}).get("index", {}).items():
        names[group] = [*names.get(group, ()), *more]
    return names
