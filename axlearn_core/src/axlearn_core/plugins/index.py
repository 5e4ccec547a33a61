"""Which of the project's own packages brings a name, for the error where that package is not installed.

`index.json` has the names: group -> name -> distribution. `pytest tests/core/plugins/test_index.py --update-goldens` writes it
from the entry points of a clone. Imports nothing but the standard library.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from axlearn_core.errors import RequestError

FILE = Path(__file__).with_name("index.json")


@functools.cache
def packages() -> Mapping[str, Mapping[str, str]]:
    """Group (`features`, `commands`, `targets`, ...) -> name -> the distribution that brings it."""
    return json.loads(FILE.read_text("utf-8"))


def package_of(group: str, name: str) -> str | None:
    """The distribution of the project that brings a name; None where none does.

    A target is also found by the size behind its name: `tpu-v5p-512` comes with what brings `tpu-v5p`.
    """
    names = packages().get(group, {})
    if name in names or group != "targets":
        return names.get(name)
    fits = [target for target in names if name.startswith(f"{target}-")]
    return names[max(fits, key=len)] if fits else None


def not_installed(group: str, name: str) -> "RequestError | None":
    """The error for a name whose package is not installed; None where no package of the project has that name."""
    from axlearn_core.errors import RequestError  # the index is read for `axlearn --help`, which imports no attrs

    package = package_of(group, name)
    if package is None:
        return None
    kind = group.removesuffix("s")
    return RequestError(f"the {kind} {name!r} is not installed: {package} brings it\n    fix: pip install {package}")
