"""Wrong layers, kernels and features."""

from typing import Any

import attrs
import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import REQUIRED, interface, node, patch
from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.errors import ConfigError
from axlearn_core.kernels import selection
from axlearn_core.kernels.op import Op
from axlearn_core.nn.initializers import Constant
from axlearn_core.nn.layer import Layer
from axlearn_core.nn.remat import tag
from axlearn_core.nn.sharding import is_sharded
from axlearn_core.plugins.feature import Feature
from axlearn_testing import Case, FeatureSuite, KernelSuite, LayerSuite
from support.mutants.harness import mutants, suite


class Scale(Layer):
    """The layer `weight * x`, and wrong variants of it."""

    @node
    class Config(Layer.Config["Scale"]):
        dim: int = interface(default=REQUIRED)
        wrong: str = ""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision):
        super().__init__(cfg, precision=precision)
        axis = {"unnamed": None, "unknown": "weird"}.get(cfg.wrong, "norm")
        self.weight = self.parameter(rngs, Constant(value=2.0), (cfg.dim,), (axis,))
        if cfg.wrong == "recompiles":
            self.function = lambda x: x

    def __call__(self, x: jax.Array) -> jax.Array:
        wrong, weight = self.cfg.wrong, self.computed(self.weight)[None, None]
        if wrong == "dtype":
            weight = weight.astype("float32")
        if wrong == "shape":
            return (x * weight)[:, 1:]
        if wrong == "nan":
            return x * weight / 0
        if wrong == "gradient":
            return x * weight - jax.lax.stop_gradient(0.1 * x * weight)
        if wrong == "input":
            return jnp.broadcast_to(weight, x.shape)
        if wrong == "parameter":
            return x * 2
        if wrong == "mesh":
            return x * weight * (2 if is_sharded() else 1)
        return tag(x * weight, "scaled")


def _layer(wrong: str = "") -> type:
    return suite(LayerSuite, Scale.Config(wrong=wrong), meshes=1)


LAYERS = mutants(
    _layer(),
    {
        "computes in a different dtype": (_layer("dtype"), "test_output_shapes_and_dtypes"),
        "returns a different shape": (_layer("shape"), "test_output_shapes_and_dtypes"),
        "divides by zero": (_layer("nan"), "test_outputs_are_finite"),
        "has an axis without a name": (_layer("unnamed"), "test_every_parameter_axis_is_named"),
        "has an axis that no rule covers": (_layer("unknown"), "test_every_parameter_axis_is_named"),
        "has a wrong gradient": (_layer("gradient"), "test_gradients"),
        "ignores its input": (_layer("input"), "test_parameters_and_inputs_matter"),
        "ignores its parameter": (_layer("parameter"), "test_parameters_and_inputs_matter"),
        "depends on the mesh": (_layer("mesh"), "test_meshes_give_equal_results"),
        "compiles again for each instance": (_layer("recompiles"), "test_equal_shapes_compile_once"),
    },
)


@attrs.frozen(eq=False)
class Product(Op):
    """x @ x."""

    name = "product"
    x: Any
    flops_factor: float = 1.0
    bytes_factor: float = 1.0

    def operands(self):
        return {"x": self.x}

    def reference(self):
        return self.x @ self.x

    def flops(self):
        return 2 * self.x.shape[0] ** 3 * self.flops_factor

    def bytes(self):
        return super().bytes() * self.bytes_factor


class Multiplying:
    """Multiply row by row, or like the reference."""

    def __init__(self, refuses: str | None = None, factor: float = 1.0, disguised: bool = False):
        self.refuses, self.factor, self.disguised = refuses, factor, disguised

    def supports(self, op, context):
        return self.refuses

    def __call__(self, op):
        if self.disguised:
            return jax.jit(op.reference)()
        return jnp.stack([row @ op.x for row in op.x]) * self.factor


RIGHT, WRONG, SILENT, UNABLE = Multiplying(), Multiplying(factor=1.005), Multiplying(" "), Multiplying("too odd")
DISGUISED = Multiplying(disguised=True)


class _Products(KernelSuite):
    """Tests of the kernels in this module."""

    def find_declaration(self, name: str) -> KernelImplementation:
        if name == selection.REFERENCE:
            return selection.reference(Product)
        return KernelImplementation(name=name.lower(), op=Product.path(), load=f"{__name__}:{name.upper()}")


def _kernel(name: str, **factors: float) -> type:
    def multiply(kernel, x):
        return Product(x, **factors).run(kernel)

    case = Case(name="one", run=multiply, operands=(jnp.arange(9.0).reshape(3, 3),))
    members = {"op": Product, "name": name, "cases": [case], "find_declaration": _Products.find_declaration}
    return suite(KernelSuite, None, **members)


KERNELS = mutants(
    _kernel("right"),
    {
        "is off by half a percent": (_kernel("wrong"), "test_values_and_gradients_match_reference"),
        "rejects calls without a reason": (_kernel("silent"), "test_refusal_has_reason"),
        "rejects every call": (_kernel("unable"), "test_kernel_supports_a_case"),
        "is the reference itself": (_kernel("disguised"), "test_kernel_differs_from_reference"),
        "counts too few FLOPs": (
            _kernel("right", flops_factor=0.5),
            "test_op_counts_flops_and_bytes",
        ),
        "counts too many bytes": (_kernel("right", bytes_factor=1.5), "test_op_counts_flops_and_bytes"),
    },
)


@node
class Longer(Feature):
    """A feature that sets the number of steps, and wrong variants of it."""

    wrong: str = ""

    def apply(self, cfg):
        if self.wrong == "refuses":
            raise ConfigError("this feature fits no experiment\n    fix: leave it out")
        if self.wrong == "rude":
            raise ConfigError("no")
        if self.wrong == "nothing":
            return cfg
        return patch(cfg, {"max_steps": cfg.max_steps + 1 if self.wrong == "grows" else 7})

    def in_effect(self, cfg):
        return self.wrong == "nothing" or (self.wrong != "denies" and cfg.max_steps == 7)


def _feature(wrong: str = "") -> type:
    members = {"name": "longer", "options": "", "experiments": ("quickstart",), "needs": lambda self: ()}
    return suite(FeatureSuite, None, **members, find_feature=lambda self, tree: Longer(wrong=wrong))


def _replacement(path: str, component: str) -> type:
    options = f"path={path},component={component}"
    members = {"name": "replace", "experiments": ("gpt2-124m",), "others": ("rope",)}
    return suite(FeatureSuite, None, options=options, **members)


FEATURES = mutants(
    _feature(),
    {
        "rejects every experiment": (_feature("refuses"), "test_feature_changes_an_experiment"),
        "does nothing and claims to be in effect": (_feature("nothing"), "test_feature_changes_an_experiment"),
        "rejects without a fix": (_feature("rude"), "test_apply_is_idempotent"),
        "changes more each time it is applied": (_feature("grows"), "test_apply_is_idempotent"),
        "claims not to be in effect": (_feature("denies"), "test_apply_is_idempotent"),
    },
) + mutants(
    _replacement("model.decoder.norm", "rms-norm,drop=[bias]"),
    {
        "drops what another feature did": (
            _replacement("model.**.position", "alibi"),
            "test_no_feature_drops_another",
        ),
    },
)

MUTANTS = [*LAYERS, *KERNELS, *FEATURES]
