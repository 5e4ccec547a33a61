"""A plugin's own op from end to end: the op, a kernel, its declaration, the suite, the choice and its record."""

import sys

import jax
import jax.numpy as jnp
import pytest

from axlearn_core.compose.flops import count_flops
from axlearn_core.errors import RequestError
from axlearn_core.kernels.selection import Selection, use
from axlearn_testing import Case, KernelSuite

OPS = '''
import attrs
import jax.numpy as jnp
from axlearn_core.kernels.op import Op

@attrs.frozen(eq=False)
class Outer(Op):
    """x y^T of two vectors, scaled."""

    name = "outer"
    x: jnp.ndarray
    y: jnp.ndarray
    scale: float = 1.0

    def operands(self):
        return {"x": self.x, "y": self.y}

    def options(self):
        return {"scale": self.scale}

    def flops(self):
        return 2.0 * self.x.size * self.y.size

    def reference(self):
        return self.scale * jnp.dot(self.x[:, None], self.y[None])
'''
KERNELS = """
class Broadcast:
    def supports(self, op, context):
        return None if op.x.shape[0] % 8 == 0 else f"the length {op.x.shape[0]} is not a multiple of 8"

    def __call__(self, op):
        return (op.scale * op.x)[:, None] * op.y[None]

BROADCAST = Broadcast()
"""
HOOKS = """
from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.plugins.hookspecs import hookimpl

@hookimpl
def axlearn_kernels():
    return [KernelImplementation(name="broadcast", op="my_ops:Outer", load="my_kernels:BROADCAST", priority=10)]
"""


@pytest.fixture
def outer(install):
    modules = {"my_ops": OPS, "my_kernels": KERNELS, "my_hooks": HOOKS}
    install("axlearn-plugins-outer", modules=modules, points={"plugins": {"outer": "my_hooks"}})
    yield __import__("my_ops").Outer
    for name in modules:
        sys.modules.pop(name, None)


def test_an_op_of_a_plugin_needs_nothing_else(outer):
    x, y = jnp.arange(8.0), jnp.arange(3.0)
    with use(Selection(platform="cpu", target="cpu")) as program:
        assert jnp.array_equal(outer(x, y, scale=2.0).run(), outer(x, y, scale=2.0).reference())
        outer(x[:5], y).run()
        with pytest.raises(RequestError, match=r"outer kernel 'broadcast' cannot do this\n.*\n.*not a multiple of 8"):
            outer(x[:5], y).run("broadcast")
    assert [c.name for c in program.choices] == ["broadcast", "xla"]
    assert program.choices[0].call == "outer(x float32[8], y float32[3], scale=2.0) on cpu"
    assert program.choices[1].rejected == {"broadcast": "the length 5 is not a multiple of 8"}
    assert "my_kernels" in sys.modules


def test_its_kernel_keeps_the_contract_of_the_suite(outer):
    def run(kernel, x, y):
        return outer(x, y, scale=0.5).run(kernel)

    cases = [Case(name=str(n), run=run, operands=(jnp.arange(float(n)), jnp.ones(3))) for n in (8, 5)]
    suite = type("Broadcast", (KernelSuite,), {"op": outer, "name": "broadcast", "cases": cases})()
    for case in cases:
        suite.test_values_and_gradients_match_reference(case)
        suite.test_refusal_has_reason(case)
        suite.test_op_counts_flops_and_bytes(case)
    suite.test_kernel_supports_a_case()


def test_the_plan_counts_it(outer):
    from axlearn_plugins_plan.flops import ScopedSelection, works

    with use(ScopedSelection(platform="cpu")) as selection:
        jaxpr = jax.make_jaxpr(lambda x, y: outer(x, y).run("xla"))(jnp.ones(8), jnp.ones(3)).jaxpr
    assert sum(w.flops for w in works(jaxpr, selection.scopes)) == selection.scopes[0].op.flops() == 48
    assert count_flops(lambda x, y: outer(x, y).run("xla"), jnp.ones(8), jnp.ones(3)) == 48
