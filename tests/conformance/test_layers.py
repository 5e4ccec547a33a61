"""Every installed layer keeps its contract."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import found
from known import CONTRACTS, REFERENCES

from axlearn_core.testing import LayerSuite, contract_of

for _name, _config in found.layers().items():
    _more = {"contract": contract_of(_config, CONTRACTS), "meshes": 1, **REFERENCES.get(_name, {})}
    globals().update(found.suites(LayerSuite, {_name: _config}, **_more))
