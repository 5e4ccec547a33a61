"""Every implementation that an installed plugin declares keeps the contract of its op."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import cases
import found

from axlearn_core.testing import KernelSuite


def test_every_op_has_cases():
    assert {k.op for k in found.kernels()} <= cases.CASES.keys()


for _kernel in found.kernels():
    _name = f"Test{_kernel.op}_{_kernel.name}".title().replace("_", "").replace("-", "")
    _more = {"op": _kernel.op, "name": _kernel.name, "cases": cases.CASES.get(_kernel.op, ())}
    globals()[_name] = type(_name, (KernelSuite,), _more)
