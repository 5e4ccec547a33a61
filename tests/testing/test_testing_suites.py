"""Messages of the suites about wrong parts. `tests/conformance/test_mutants.py` tries all of them."""

import jax.numpy as jnp
import pytest

from axlearn_core.config import REQUIRED, interface, node
from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.kernels import selection
from axlearn_core.nn.layer import Layer
from axlearn_testing import (
    Case,
    FeatureSuite,
    KernelSuite,
    LayerSuite,
)  # fmt: skip
from support.mutants.layers import Product, Scale
from support.toy_distribution import install_toy

FAILS = (AssertionError, pytest.fail.Exception)


def layer(**more):
    return type("Suite", (LayerSuite,), {"config": Scale.Config(), "meshes": 1, **more})()


def test_a_reference_that_says_otherwise():
    layer(reference=staticmethod(lambda params, x: x * params["weight"][None, None])).test_gradients()
    with pytest.raises(AssertionError, match="outputs"):
        layer(reference=staticmethod(lambda params, x: 1.01 * x * params["weight"][None, None])).test_gradients()


def test_a_layer_of_no_known_contract_is_told_to_say_it():
    class Odd(Layer):
        @node
        class Config(Layer.Config["Odd"]):
            width: int = interface(default=REQUIRED)

    with pytest.raises(FAILS, match="set `contract`"):
        type("Suite", (LayerSuite,), {"config": Odd.Config()})().test_every_parameter_axis_is_named()


@pytest.fixture
def kernel(monkeypatch):
    declared = [
        selection.reference(Product),
        *(
            KernelImplementation(name=n.lower(), op=Product.path(), load=f"support.mutants.layers:{n}")
            for n in ("WRONG", "SILENT", "UNABLE")
        ),
    ]
    monkeypatch.setattr(selection, "installed", lambda op: declared)

    def suite(name, **factors):
        def multiply(kernel, x):
            return Product(x, **factors).run(kernel)

        case = Case(name="one", run=multiply, operands=(jnp.arange(9.0).reshape(3, 3),))
        return type("S", (KernelSuite,), {"op": Product, "name": name, "cases": [case]})(), case

    return suite


def test_kernels(kernel):
    suite, case = kernel("xla")
    suite.test_values_and_gradients_match_reference(case)
    suite.test_kernel_supports_a_case()
    suite, case = kernel("wrong")
    with pytest.raises(AssertionError, match="differs by"):
        suite.test_values_and_gradients_match_reference(case)
    suite, case = kernel("silent")
    with pytest.raises(AssertionError, match="must return None or a reason"):
        suite.test_refusal_has_reason(case)
    suite, case = kernel("unable")
    suite.test_refusal_has_reason(case)
    with pytest.raises(AssertionError, match="refuses every case"):
        suite.test_kernel_supports_a_case()


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.01])
@pytest.mark.parametrize("figure", ["flops", "bytes"])
def test_figures_of_an_op_are_held_against_its_reference(kernel, figure, factor):
    suite, case = kernel("xla")
    suite.test_op_counts_flops_and_bytes(case)
    suite, case = kernel("xla", **{f"{figure}_factor": factor})
    with pytest.raises(AssertionError, match=rf"product\.{figure}\(\) is"):
        suite.test_op_counts_flops_and_bytes(case)


GROWING = '''
from axlearn_core.config import node, patch
from axlearn_core.plugins.feature import Feature

@node
class Growing(Feature):
    """Adds a step each time."""
    def apply(self, cfg):
        return patch(cfg, {"max_steps": cfg.max_steps + 1})

@node
class Doubling(Feature):
    """Doubles them."""
    def apply(self, cfg):
        return patch(cfg, {"seed": cfg.seed + 1, "log_every_steps": cfg.seed + 1})

@node
class Silent(Feature):
    def apply(self, cfg):
        return patch(cfg, {"seed": 7})
    def in_effect(self, cfg):
        return cfg.seed == 7
'''


@pytest.fixture
def growing(install):
    install_toy(install)
    install(
        "axlearn-plugins-growing",
        modules={"growing": GROWING, "growing_root": ROOT},
        points={
            "features": {n.lower(): f"growing:{n}" for n in ("Growing", "Doubling", "Silent")},
            "components": {"growing-root": "growing_root:Root"},
            "experiments": {"small": "growing_root:small"},
        },
    )
    return lambda name, **more: type("S", (FeatureSuite,), {"name": name, "experiments": ("small",), **more})()


ROOT = """
from axlearn_core.config import Configurable, node

class Root(Configurable):
    @node
    class Config(Configurable.Config["Root"]):
        max_steps: int = 1
        seed: int = 0
        log_every_steps: int = 1

def small():
    return Root.Config()
"""


def test_features(growing):
    def suite(name, **more):
        result = growing(name, **more)
        result.setup_method()
        return result

    with pytest.raises(AssertionError, match="applying it twice changes more"):
        suite("growing").test_apply_is_idempotent()
    with pytest.raises(AssertionError, match="needs a docstring"):
        suite("silent").test_feature_has_docstring()
    suite("silent").test_apply_is_idempotent()
    suite("silent", others=("growing",)).test_order_of_features_does_not_matter()
