"""Import of optional libraries."""

import importlib
from types import ModuleType

from axlearn_core.errors import RequestError


def import_library(module: str, extra: str) -> ModuleType:
    """Import a library that an extra of this distribution installs.

    Args:
        module: Name of the module.
        extra: Name of the extra.

    Raises:
        RequestError: If the library is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RequestError(
            f"the library {module} cannot be imported: {error}\n    fix: pip install 'axlearn-plugins-rl[{extra}]'"
        ) from None
