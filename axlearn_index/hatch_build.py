"""Write `index.json` before a wheel or a source distribution is built.

In the workspace, the index is generated from the members' pyproject files. A source distribution contains the finished
file.
"""

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class IndexHook(BuildHookInterface):
    """Build hook that generates the index for the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the index. Raise `RuntimeError` if it cannot be generated and does not exist."""
        package = Path(self.root) / "src" / "axlearn_index"
        file, workspace = package / "index.json", Path(self.root).parent
        if (workspace / "axlearn_core" / "pyproject.toml").exists():
            build = runpy.run_path(str(package / "build.py"))
            build["write_index"](file, build["workspace_members"](workspace))
        elif not file.exists():
            raise RuntimeError(f"cannot write the index: found neither {file} nor a workspace to generate it from")
