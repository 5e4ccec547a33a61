"""Writes `index.json` before a wheel or a source distribution is built.

In the workspace the index is made from the members' pyproject files. A source distribution has the finished file.
"""

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class IndexHook(BuildHookInterface):
    """Makes the index that the wheel holds."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Writes the index; raises if it can neither be made nor found."""
        package = Path(self.root) / "src" / "axlearn_index"
        file, workspace = package / "index.json", Path(self.root).parent
        if (workspace / "axlearn_core" / "pyproject.toml").exists():
            build = runpy.run_path(str(package / "build.py"))
            build["write_index"](file, build["workspace_members"](workspace))
        elif not file.exists():
            raise RuntimeError(f"there is neither {file} nor a workspace to make it from")
