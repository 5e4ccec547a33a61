"""Every installed feature keeps its contract, on every installed experiment, with every other feature."""

from axlearn_core.plugins.registry import registry
from axlearn_core.testing import FeatureSuite

_names = [e.name for e in registry().entries("features")]
for _i, _feature in enumerate(_names):
    _name = f"Test{_feature.title().replace('-', '')}"
    _later = tuple(_names[_i + 1 :])  # every pair once: the suite tries both orders
    globals()[_name] = type(_name, (FeatureSuite,), {"name": _feature, "others": _later})
