"""Scripts in `benchmarks`, as modules."""

import functools
import importlib.util
from types import ModuleType

from support.paths import ROOT


@functools.cache
def load_benchmark(name: str) -> ModuleType:
    """Return the script `benchmarks/NAME.py` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
