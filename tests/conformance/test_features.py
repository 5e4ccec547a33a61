"""Every installed feature keeps its contract, on every installed experiment, with every other feature."""

from axlearn_core.plugins.registry import registry
from axlearn_core.testing import FeatureSuite

for _entry in registry().entries("features"):
    _name = f"Test{_entry.name.title().replace('-', '')}"
    globals()[_name] = type(_name, (FeatureSuite,), {"name": _entry.name})
