"""Every declared kernel of an installed plugin passes the suite of its op, and so does the op."""

import pytest

from axlearn_core.kernels.selection import REFERENCE
from axlearn_plugins_cpu.kernels import library
from axlearn_testing import KernelSuite
from support import installed_parts, op_cases

SHARED = ("ring", "context-all-gather", "context-all-to-all")
"""Kernels that need several devices; on one device they are the reference."""

VALUES = "test_values_and_gradients_match_reference"
SLOW_CASES = {
    "attention": ("alibi-*", "causal-*", "chunks-*", "prefix-*", "selected-*", "window-*"),
    "gated_linear_unit": ("gelu*", "silu-80-*"),
    "grouped_matmul": ("0-0-200-*", "1-2-3-*", "*-bfloat16"),
    "invariant_attention": ("alibi-*", "causal-*", "chunks-*", "sinks-*"),
    "linear_attention": ("delta-bfloat16", "delta-elements-*", "delta-float32", "reload-*", "sum-float32"),
    "paged_attention": (
        "prefill-*",
        "split-bfloat16-*",
        "split-bias-*",
        "split-chunks-*",
        "split-finite-*",
        "split-prefix-*",
        "split-selected-*",
        "split-w*",
    ),
}
"""Cases of each op that other cases cover in part, and that take seconds to compile."""


def test_every_op_has_cases():
    assert installed_parts.kernels().keys() <= op_cases.CASES.keys()


for _op, _declared in installed_parts.kernels().items():
    for _kernel in _declared:
        _name = f"Test{_op.name}_{_kernel.name}".title().replace("_", "").replace("-", "")
        _mesh = {"seq": 4} if _kernel.name in SHARED else {}
        _slow = [f"{VALUES}[{case}]" for case in SLOW_CASES.get(_op.name, ())]
        if _kernel.name != REFERENCE:
            _slow.append("test_op_counts_flops_and_bytes")  # the reference's suite tests the same, without the kernel
        _more = {"mesh": _mesh, "op": _op, "name": _kernel.name, "cases": op_cases.CASES.get(_op, ())}
        _suite = pytest.mark.slow_cases(*_slow)(type(_name, (KernelSuite,), _more))
        if _kernel.load.startswith("axlearn_plugins_cpu.") and library.unavailable_reason is not None:
            # tests/plugins/cpu fails if the library should exist.
            _suite = pytest.mark.skip(reason=f"needs the C++ library: {library.unavailable_reason}")(_suite)
        globals()[_name] = _suite
