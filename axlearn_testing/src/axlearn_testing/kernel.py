"""Suite for ops and their kernels."""

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.compose.flops import count_flops, get_jaxpr
from axlearn_core.compose.layout import Layout, make_mesh
from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.errors import RequestError
from axlearn_core.kernels import selection
from axlearn_core.kernels.op import Op
from axlearn_core.nn.sharding import logical_rules
from axlearn_testing.common import assert_close, compile_fast, is_float, leaves_by_path, need_devices


@attrs.frozen(kw_only=True, eq=False)
class Case:
    """An op call.

    Attributes:
        name: Name of the test case.
        run: `(kernel name or None, *operands) -> result`, which calls the op.
        operands: Arrays or pytrees of arrays.
        tolerance: Tolerance of results and gradients, relative to the norm of each array.
        gradients: Whether the op is differentiable. If so, gradients are compared too.
    """

    name: str
    run: Callable[..., Any]
    operands: tuple[Any, ...]
    tolerance: float = 1e-5
    gradients: bool = True


T = TypeVar("T")
_REMEMBERED: MutableMapping[Case, dict[Hashable, Any]] = weakref.WeakKeyDictionary()

PADDING = 1.25
"""Maximum ratio of the FLOPs and bytes of a reference to those that the op reports."""


CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat", "checkpoint")
"""Primitives that only call a function."""


@attrs.frozen
class Count:
    """FLOPs and bytes that a call reports, and those counted in its reference's jaxpr."""

    flops: float
    bytes: float
    reference_flops: float
    reference_bytes: float


@attrs.define(eq=False)
class _CountingSelection(selection.Selection):
    """Selection that counts each call while its operands are available for tracing the reference."""

    counts: list[Count] = attrs.field(factory=list)

    def choose(self, op: Any, name: str | None = None) -> Any:
        """Choose a kernel."""
        kernel, call = super().choose(op, name), op.abstract()
        closed = jax.make_jaxpr(op.reference)()
        arrays = [*closed.consts, *closed.out_avals]
        moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
        self.counts.append(Count(call.flops(), call.bytes(), count_flops(op.reference), moved))
        return kernel


class KernelSuite:
    """Tests that an op and one of its kernels must pass.

    Attributes:
        op: Class of the op.
        name: Name of the kernel, as declared through `axlearn_kernels`; `xla` is the reference.
        cases: Calls to test. The kernel must refuse unsupported calls with a reason.
        baseline: Name of the kernel to compare with.
        mesh: Mesh shape for kernels that run on several devices; empty for no mesh.
    """

    op: type[Op[Any]]
    name: str
    cases: Sequence[Case]
    baseline: str = selection.REFERENCE
    mesh: Mapping[str, int] = {}

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrize tests over the cases."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases, ids=[c.name for c in self.cases])

    def find_declaration(self, name: str) -> KernelImplementation:
        """Return the declaration of one of the op's kernels."""
        kernels = {k.name: k for k in selection.installed(self.op)}
        assert name in kernels, (
            f"no installed plugin declares the {self.op.name} kernel {name!r}; declared: {', '.join(kernels)}"
        )
        return kernels[name]

    def test_values_and_gradients_match_reference(self, case: Case) -> None:
        reason = self._refusal(case, self._local_kernel())
        if reason is not None:
            return  # a refusal is allowed; the next test checks it
        got = self._measure_baseline(case) if self.name == self.baseline else self._measure(case, self.name)
        for path, x in leaves_by_path(got).items():
            assert np.isfinite(np.asarray(x, np.float32)).all(), f"{case.name}{path} has non-finite values"
        expected = got if self.name == self.baseline else self._measure_baseline(case)
        assert_close(got, expected, case.tolerance, f"{case.name}: (results, gradients)")

    def test_refusal_has_reason(self, case: Case) -> None:
        implementation = self._local_kernel()
        reason = self._refusal(case, implementation)
        assert reason is None or (isinstance(reason, str) and reason.strip()), "supports() must return None or a reason"
        if reason is not None:
            with pytest.raises(RequestError, match="cannot do this") as error, self._only(implementation):
                jax.eval_shape(lambda *operands: case.run(self.name, *operands), *case.operands)
            assert reason in str(error.value)

    def test_op_counts_flops_and_bytes(self, case: Case) -> None:
        counting = _CountingSelection(declared=lambda op: [selection.reference(op)])
        with selection.use(counting):
            jax.eval_shape(lambda *operands: case.run(selection.REFERENCE, *operands), *case.operands)
        assert counting.counts, f"{case.name} does not call the op {self.op.name!r}"
        for count in counting.counts:
            label = f"{case.name}: {self.op.name}"
            assert count.flops <= count.reference_flops <= PADDING * count.flops, (
                f"{label}.flops() is {count.flops:,}, but the matmuls of its reference take {count.reference_flops:,}"
            )
            assert 0 < count.bytes <= count.reference_bytes <= PADDING * count.bytes, (
                f"{label}.bytes() is {count.bytes:,}, but its reference reads and writes {count.reference_bytes:,}"
            )

    def test_kernel_supports_a_case(self) -> None:
        implementation = self._local_kernel()
        assert any(self._refusal(case, implementation) is None for case in self.cases), (
            "it refuses every case, so nothing is tested"
        )

    def test_kernel_differs_from_reference(self) -> None:
        if self.name == self.baseline:
            pytest.skip(f"needs another kernel: {self.name!r} is the reference")
        implementation, traces = self._local_kernel(), []
        for case in self.cases:
            if self._refusal(case, implementation) is None:
                traces.append([_operations(self._traced(case, name)) for name in (self.name, self.baseline)])
                if traces[-1][0] != traces[-1][1]:
                    return
        assert not traces, f"{self.name} traces to the same operations as {self.baseline} in every case"

    def _traced(self, case: Case, name: str) -> Any:
        with self._only(self.find_declaration(name)):
            return jax.make_jaxpr(functools.partial(case.run, name))(*case.operands).jaxpr

    def _local_kernel(self) -> KernelImplementation:
        implementation = self.find_declaration(self.name)
        if implementation.platforms and jax.default_backend() not in implementation.platforms:
            pytest.skip(f"needs a {' or '.join(implementation.platforms)} device, got {jax.default_backend()}")
        return implementation

    @contextlib.contextmanager
    def _only(self, *implementations: KernelImplementation) -> Iterator[selection.Selection]:
        kernel_selection = selection.Selection(
            declared=lambda op: implementations if op is self.op else [selection.reference(op)]
        )
        count = math.prod(self.mesh.values())
        need_devices(count)
        layout = Layout(make_mesh(Mesh(shape=self.mesh), jax.devices()[:count]), Mesh(shape=self.mesh))
        on_mesh = logical_rules(layout.mesh, layout.rules) if self.mesh else contextlib.nullcontext()
        with on_mesh, selection.use(kernel_selection):
            yield kernel_selection

    def _refusal(self, case: Case, implementation: KernelImplementation) -> str | None:
        """Return why the kernel does not support the case, or None if it does."""
        with self._only(self.find_declaration(self.baseline)) as op_selection:
            choices = self._remember(case, "choices", lambda: self._find_choices(case, op_selection))
            reasons = (selection.refusal(implementation, c.op, c.context) for c in choices)
            return next((reason for reason in reasons if reason is not None), None)

    def _find_choices(self, case: Case, op_selection: selection.Selection) -> list[selection.Choice]:
        jax.eval_shape(lambda *operands: case.run(self.baseline, *operands), *case.operands)
        choices = [c for c in op_selection.choices if type(c.op) is self.op]  # an op may call other ops
        assert choices, f"{case.name} does not call the op {self.op.name!r}"
        return choices

    def _measure_baseline(self, case: Case) -> Any:
        return self._remember(case, "results", lambda: self._measure(case, self.baseline))

    def _remember(self, case: Case, what: str, compute: Callable[[], T]) -> T:
        """Compute something that all kernels with the same baseline, mesh and case share, or return the earlier value."""
        declaration = self.find_declaration(self.baseline)
        # A subclass may override `_only`, for example to set the hardware.
        key = (what, self.op, declaration.name, declaration.load, type(self)._only, *self.mesh.items())
        remembered = _REMEMBERED.setdefault(case, {})
        if key not in remembered:
            remembered[key] = compute()
        return remembered[key]

    def _measure(self, case: Case, name: str) -> Any:
        """Return the results, and the gradients of a random weighted sum of them with respect to every float operand."""
        if not case.gradients:
            with self._only(self.find_declaration(name)):
                return compile_fast(functools.partial(case.run, name))(*case.operands)
        flat, tree = jax.tree.flatten(case.operands)
        floats = {i: jnp.asarray(x) for i, x in enumerate(flat) if is_float(x)}

        def loss(floats: dict[int, Any]) -> tuple[Any, Any]:
            result = case.run(name, *tree.unflatten([floats.get(i, x) for i, x in enumerate(flat)]))
            rng = np.random.default_rng(0)
            parts = [
                jnp.sum(x.astype(jnp.float32) * rng.normal(0, 1, x.shape).astype(np.float32))
                for x in jax.tree.leaves(result)
            ]
            return sum(parts, start=jnp.zeros(())), result

        with self._only(self.find_declaration(name)):
            (_, result), gradients = compile_fast(jax.value_and_grad(loss, has_aux=True))(floats)
        return result, gradients


def _operations(jaxpr: Any) -> list[str]:
    """Return the primitives with their output types, in order; called functions are inlined."""
    operations = []
    for equation in jaxpr.eqns:
        inner = [_operations(j) for x in equation.params.values() for j in _jaxprs(x)]
        if equation.primitive.name in CALLS and inner:
            operations += inner[0]
        else:
            types = ", ".join(str(v.aval) for v in equation.outvars)
            operations.append(f"{equation.primitive.name} {types} {inner}")
    return operations


def _jaxprs(parameter: object) -> list[Any]:
    values = parameter if isinstance(parameter, tuple | list) else [parameter]
    return [jaxpr for x in values if (jaxpr := get_jaxpr(x)) is not None]
