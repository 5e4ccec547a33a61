"""Suite for layers."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_vjp

from axlearn_core.checkpoint import ShardedCheckpointer
from axlearn_core.compose.functional import Functional
from axlearn_core.compose.layout import Layout, make_mesh
from axlearn_core.config import Node
from axlearn_core.contracts.mesh import DEFAULT_RULES, MESH_AXES, Mesh
from axlearn_core.errors import ConfigError
from axlearn_core.kernels import selection
from axlearn_core.nn.layer import Precision
from axlearn_core.nn.remat import Remat
from axlearn_core.nn.sharding import logical_rules
from axlearn_testing.common import (
    assert_close,
    assert_equal,
    compile_fast,
    is_float,
    leaves_by_path,
    need_devices,
    norm,
)
from axlearn_testing.contracts import Contract, find_contract

DEVICES = 8
DTYPES = (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16"))
STEP = 1e-3  # step size of the finite differences


@attrs.frozen(eq=False)
class Measurement:
    """Outputs of a call, and the gradients of a fixed random weighted sum of them with respect to all float inputs."""

    outputs: Any
    gradients: Any


class LayerSuite:
    """Tests that every layer must pass.

    Attributes:
        config: Config of the layer, with all required fields set.
        contract: How the layer is built and called; the default is the contract that matches its signature.
        reference: `(params by path, *inputs) -> outputs` in plain float32. Without a reference, gradients are compared with
            finite differences.
        rules: Mesh rules for logical axes without a default rule.
        tolerance: Tolerance of gradients and outputs, relative to the norm of each array.
        reference_tolerance: Like `tolerance`, but for the comparison with the reference.
        difference_tolerance: Like `tolerance`, but for the comparison of gradients with finite differences.
        meshes: Number of random meshes to test.
        seed: Seed for the parameters, inputs and meshes.
    """

    config: Node[Any]
    contract: Contract | None = None
    reference: Callable[..., Any] | None = None
    rules: Mapping[str, tuple[str, ...]] = {}
    tolerance: float = 2e-5
    reference_tolerance: float = 1e-4
    difference_tolerance: float = 1e-2
    meshes: int = 2
    seed: int = 0

    def get_contract(self) -> Contract:
        """Return the contract."""
        contract = self.contract or _contract(self.config)
        if contract is None:
            pytest.fail(
                f"no contract matches {type(self.config).__qualname__}: set `contract` to an axlearn_testing.Contract "
                "with the arguments that the parent offers and passes"
            )
        return contract

    def build_functional(self, params: str = "float32", compute: str = "float32") -> Functional:
        """Return the layer as pure functions."""
        return _build_functional(type(self), params, compute)

    def inputs(self) -> tuple[Any, ...]:
        """Return the arguments that the parent passes, with floats in float32."""
        return self.get_contract().inputs(np.random.default_rng(self.seed))

    def call(self, layer: object, *inputs: object) -> Any:
        """Call the layer as its parent does."""
        return getattr(layer, self.get_contract().method)(*inputs)

    @pytest.mark.parametrize(("params", "compute"), DTYPES)
    def test_output_shapes_and_dtypes(self, params: str, compute: str) -> None:
        functional, expected = self.build_functional(params, compute), self.get_contract().outputs
        inputs = jax.tree.map(lambda x: x.astype(compute) if is_float(x) else x, self.inputs())
        got = leaves_by_path(jax.eval_shape(self._bind_call(functional), functional.abstract, inputs))
        if expected is not None:
            specs = leaves_by_path(expected(inputs, jnp.dtype(compute)))
            assert {p: (x.shape, x.dtype) for p, x in got.items()} == {p: (x.shape, x.dtype) for p, x in specs.items()}

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_outputs_are_finite(self, dtype: str) -> None:
        outputs = _single(type(self)).outputs
        if dtype != "float32":
            arguments = (_params(type(self)), self.inputs())
            arguments = jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, arguments)
            outputs = compile_fast(self._bind_call(self.build_functional(dtype, dtype)))(*arguments)
        for path, x in leaves_by_path(outputs).items():
            assert np.isfinite(np.asarray(x, np.float32)).all(), f"outputs{path} has non-finite values"

    def test_every_parameter_axis_is_named(self) -> None:
        functional = self.build_functional()
        rules = {**DEFAULT_RULES, **self.rules}
        for path, axes in functional.axes.items():
            for size, axis in zip(functional.abstract[path].shape, axes, strict=True):
                assert axis is not None or size == 1, f"{path} {axes}: an axis of size {size} has no logical name"
                assert axis is None or axis in rules, f"{path}: no mesh rule covers {axis!r}; add one to `rules`"

    def test_gradients(self) -> None:
        single = _single(type(self))
        floats, fixed = self._arguments()
        if self.reference is not None:
            reference = type(self).reference  # it may be a plain function
            expected = compile_fast(self._measurement(lambda params, inputs: reference(params, *inputs)))(floats, fixed)  # type: ignore[misc]
            got, reference_outputs = (
                jax.tree.leaves(m.outputs) for m in (single, expected)
            )  # a plain tuple may replace a named tuple
            assert_close(got, reference_outputs, self.reference_tolerance, "outputs")
            assert_close(single.gradients, expected.gradients, self.reference_tolerance, "gradients")
            return
        for path, leaf in floats.items():  # one leaf at a time, so that errors in small leaves are detected too
            gradient = single.gradients[path]
            size = norm(leaf) / leaf.size**0.5
            step = STEP * min(
                1.0, 10 * size or 0.1
            )  # small leaves need a smaller step, or a later norm would be nonlinear

            def value(x: object, path: str = path) -> Any:
                outputs = _run(type(self))(floats | {path: x}, fixed).outputs
                return self._weighted_sum(outputs, np, "float64")  # a float32 sum would round too much

            def value_and_pullback(x: Any, value: Any = value, gradient: Any = gradient) -> Any:
                return value(x), lambda cotangent: (cotangent * gradient,)

            check_vjp(
                value,
                value_and_pullback,
                (leaf,),
                atol=self.difference_tolerance * norm(gradient) + 1e-6 / STEP,
                rtol=self.difference_tolerance,
                eps=step,
                err_msg=f"gradient of {path}",
            )

    def test_parameters_and_inputs_matter(self) -> None:
        outputs = _single(type(self)).outputs
        floats, fixed = self._arguments()
        # Add a different number to each element. Adding the same number to all logits would not change any probability.
        rng = np.random.default_rng(self.seed + 2)
        changed = {p: x + rng.uniform(0.5, 1.5, x.shape) for p, x in floats.items() if p.startswith("['params']")}
        changed = {p: x.astype(floats[p].dtype) for p, x in changed.items()}
        if changed:
            other = _run(type(self))(floats | changed, fixed).outputs
            assert not _equal(other, outputs), "different parameters give the same outputs"
        rng = np.random.default_rng(self.seed + 1)
        other = leaves_by_path({"inputs": jax.tree.map(jnp.asarray, self.get_contract().inputs(rng))})
        if other:
            floats |= {p: x for p, x in other.items() if is_float(x)}
            fixed |= {p: x for p, x in other.items() if not is_float(x)}
            assert not _equal(_run(type(self))(floats, fixed).outputs, outputs), (
                "different inputs give the same outputs"
            )

    def test_meshes_give_equal_results(self) -> None:
        need_devices(DEVICES)
        single, functional, (floats, fixed) = _single(type(self)), self.build_functional(), self._arguments()
        for mesh in self._meshes(functional):
            layout = Layout(make_mesh(mesh, jax.devices()[:DEVICES]), mesh)
            placed = [
                {p: jax.device_put(x, self._place(layout, functional, p, x)) for p, x in part.items()}
                for part in (floats, fixed)
            ]
            with logical_rules(layout.mesh, layout.rules), selection.use(selection.Selection()):
                result = compile_fast(self._measurement(self._bind_call(functional)))(*placed)
            label = f"on the mesh {dict(mesh.shape)}, "
            assert_close(result.outputs, single.outputs, self.tolerance, f"{label}outputs")
            assert_close(result.gradients, single.gradients, self.tolerance, f"{label}gradients")

    def test_checkpoint_restores_parameters(self, tmp_path: Path) -> None:
        params, functional = {**_params(type(self)), **_variables(type(self))}, self.build_functional()
        if not params:
            return  # there is nothing to save
        checkpointer = ShardedCheckpointer.Config().build(directory=tmp_path)
        checkpointer.save(1, params, extra={}, metrics={})
        checkpointer.wait()
        restored, _ = checkpointer.restore(1, {**functional.abstract, **functional.variables})
        checkpointer.close()
        assert_equal(restored, params, "restored")

    def test_remat_gives_equal_results(self) -> None:
        single, bound, arguments = _single(type(self)), self._bind_call(self.build_functional()), self._arguments()
        remat = Remat.Config().build()
        jax.eval_shape(self._measurement(remat.wrap(bound, in_loop=False)), *arguments)
        tags = sorted(remat._tags)
        some = Remat.Config(save=tuple(tags[::2])).build()
        result = compile_fast(self._measurement(some.wrap(bound, in_loop=False)))(*arguments)
        some.check()
        assert_close(result.outputs, single.outputs, self.tolerance, f"saving {tags[::2]}, outputs")
        assert_close(result.gradients, single.gradients, self.tolerance, f"saving {tags[::2]}, gradients")

    def test_equal_shapes_compile_once(self) -> None:
        traces = []

        def call(graph: Any, state: Any, inputs: Any) -> Any:
            traces.append(graph)
            return self.call(nnx.merge(graph, state), *inputs)

        jitted = jax.jit(call, static_argnums=0)
        for seed in (0, 1):
            graph, state = nnx.split(self.get_contract().build(self.config, seed=seed))
            jitted.trace(graph, state, self.inputs())
        assert len(traces) == 1, (
            "two layers with the same config are traced twice: a value in the module compares unequal"
        )

    def _arguments(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return parameters and inputs by path: the floats, and the other leaves."""
        params = _params(type(self))
        flat = leaves_by_path({"params": params, "inputs": jax.tree.map(jnp.asarray, self.inputs())})
        return {p: x for p, x in flat.items() if is_float(x)}, {p: x for p, x in flat.items() if not is_float(x)}

    def _bind_call(self, functional: Functional) -> Callable[..., Any]:
        variables = _variables(type(self))
        return lambda params, inputs: self.call(functional.bind(params, variables), *inputs)

    def _measurement(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `(floats, fixed) -> Measurement` for `function(params, inputs)`."""
        tree = jax.tree.structure({"params": _params(type(self)), "inputs": self.inputs()})
        paths = list(leaves_by_path(tree.unflatten(range(tree.num_leaves))))

        def measure(floats: dict[str, Any], fixed: dict[str, Any]) -> Measurement:
            def loss(floats: dict[str, Any]) -> tuple[Any, Any]:
                values = tree.unflatten([{**floats, **fixed}[p] for p in paths])
                outputs = function(values["params"], values["inputs"])
                return self._weighted_sum(outputs, jnp, "float32"), outputs

            (_, outputs), gradients = jax.value_and_grad(loss, has_aux=True)(floats)
            return Measurement(outputs, gradients)

        return measure

    def _weighted_sum(self, outputs: object, numpy: Any, dtype: str) -> Any:
        """Return a randomly weighted sum of all floats in the outputs."""
        rng = np.random.default_rng(self.seed + 1)
        floats = [x for x in jax.tree.leaves(outputs) if is_float(x)]
        weights = [rng.normal(0, x.size**-0.5, x.shape) for x in floats]
        parts = [numpy.sum(numpy.asarray(x, dtype) * w.astype(dtype)) for x, w in zip(floats, weights, strict=True)]
        return sum(parts, start=numpy.zeros((), dtype))

    def _place(self, layout: Layout, functional: Functional, path: str, x: Any) -> Any:
        for name, axes in functional.axes.items():
            if path == f"['params']['{name}']":
                return layout.sharding(axes, x.shape, name)
        try:
            return layout.sharding(("batch", "sequence", *(None,) * x.ndim)[: x.ndim], x.shape, path)
        except ConfigError:  # the input has no batch dimension, or has one row for the whole batch
            return layout.replicated

    def _meshes(self, functional: Functional) -> list[Mesh]:
        """Return random meshes that the parameters can be sharded over."""
        rng = np.random.default_rng(self.seed)
        meshes: list[Mesh] = []
        for _ in range(100):
            shape: dict[str, int] = {}
            for axis in rng.choice(MESH_AXES[1:], 3):
                shape[str(axis)] = 2 * shape.get(str(axis), 1)
            mesh = Mesh(shape=shape, rules=self.rules)
            layout = Layout(make_mesh(mesh, jax.devices()[:DEVICES]), mesh)
            try:
                for path, axes in functional.axes.items():
                    layout.spec(axes, functional.abstract[path].shape, path)
            except ConfigError:
                continue
            if mesh not in meshes:
                meshes.append(mesh)
            if len(meshes) == self.meshes:
                return meshes
        pytest.fail(
            f"the parameters fit only {len(meshes)} of 100 random meshes of {DEVICES} devices; set larger sizes"
        )


jax.tree_util.register_pytree_node(
    Measurement, lambda m: ((m.outputs, m.gradients), None), lambda _, parts: Measurement(*parts)
)


def _equal(one: object, two: object) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True))


# Cached for all tests of a suite, because pytest creates an instance per test.
_contract = functools.cache(find_contract)


@functools.cache
def _build_functional(suite: type[LayerSuite], params: str, compute: str) -> Functional:
    instance = suite()
    return Functional.from_config(
        instance.config, precision=Precision(params, compute), **instance.get_contract().offered
    )


@functools.cache
def _params(suite: type[LayerSuite]) -> Any:
    instance = suite()
    return compile_fast(instance.build_functional().init)(jax.random.key(instance.seed))


@functools.cache
def _variables(suite: type[LayerSuite]) -> Any:
    """Return the layer's variables after initialization."""
    functional = suite().build_functional()
    if not functional.variables:
        return {}
    return compile_fast(lambda key: functional.init_arrays(key)[1])(jax.random.key(suite.seed))


@functools.cache
def _run(suite: type[LayerSuite]) -> Callable[..., Measurement]:
    instance = suite()
    return compile_fast(instance._measurement(instance._bind_call(instance.build_functional())))


@functools.cache
def _single(suite: type[LayerSuite]) -> Measurement:
    return _run(suite)(*suite()._arguments())
