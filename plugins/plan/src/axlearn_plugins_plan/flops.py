"""Count the floating-point operations of a program from its jaxpr, including those in kernels.

There are two conventions for attention. *Full* counts all pairs of positions, as most published utilization figures do (Chowdhery
et al., 2022, appendix B). *Causal* counts only the pairs that the mask allows.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import jax
from jax.extend.core import Literal

from axlearn_core.compose import Program
from axlearn_core.compose.flops import (
    Gradients,
    equation_flops,
    gradients_of_loss,
    inner_jaxprs,
    mapped_devices,
    mark_leaves,
)
from axlearn_core.contracts.arrays import is_array
from axlearn_core.contracts.kernels import Kernel, KernelContext, tags_result
from axlearn_core.kernels.op import Op
from axlearn_core.kernels.selection import REFERENCE, Selection, use

R = TypeVar("R")

_SCOPE = re.compile(r"axlearn_op_(\d+)")
_KERNELS = ("pallas_call", "mpmd_map", "ffi_call")
"""Primitives of kernels. Mosaic GPU and TPU kernels that name their cores use `mpmd_map`; `ffi_call` calls a compiled library."""
_CUDNN = re.compile(r"dot_product_attention_(?:fp8_)?(fwd|bwd)")


@attrs.frozen
class Work:
    """An equation that performs floating-point operations, and how often it runs.

    Attributes:
        times: Executions per step, summed across all devices.
        visible: Share of position pairs that the enclosing attention op's mask allows.
        kernel: Whether the equation is inside a kernel. Kernels skip masked blocks.
        product: FLOPs of one execution if the op reports them (`Op.kernel_flops`). They replace the count of the kernel's body.
        products: Factor for the gradients that training needs; see `Gradients.products`.
    """

    equation: Any
    times: float
    visible: float
    kernel: bool
    product: float | None = None
    products: int = 1

    @property
    def flops(self) -> float:
        """FLOPs of all executions, with every pair of positions visible. A multiply-add counts as two."""
        return self.products * self._forward_flops

    @property
    def _forward_flops(self) -> float:
        name, params = self.equation.primitive.name, self.equation.params
        if self.product is not None:
            return self.times * self.product
        if name == "pallas_call":
            return self.times * params["cost_estimate"].flops
        if match := _CUDNN.match(name):
            query, key, value = (self.equation.invars[i].aval.shape for i in range(3))
            batch, length, heads, size = query  # JAX passes only the layout BTNH to cuDNN
            forward = 2 * batch * heads * length * key[1] * (size + value[3])
            return self.times * forward * (1 if match[1] == "fwd" else 2.5)  # five matmuls backward, two forward
        return self.times * equation_flops(self.equation)

    @property
    def dtype(self) -> str:
        """Dtype of the narrower of the two operands."""
        operands = [v.aval for v in self.equation.invars if is_array(v.aval)]
        operands = [a for a in operands if a.ndim > 1] or operands  # skip a kernel's offsets
        return str(min((a.dtype for a in operands[:2]), key=lambda d: d.itemsize)) if operands else "float32"


@attrs.frozen
class Scope:
    """An op call, identified by the name stacks of its equations.

    Attributes:
        op: The abstract call.
        visible: Share of the call's FLOPs that are mathematically required.
    """

    op: Op[Any]
    visible: float


def works(
    jaxpr: Any,
    scopes: Sequence[Scope] = (),
    times: float = 1,
    visible: float = 1.0,
    kernel: bool = False,
    op: Op[Any] | None = None,
    gradients: Gradients | None = None,
) -> Iterator[Work]:
    """Yield the live equations that perform floating-point operations, in a jaxpr and in the jaxprs that it calls.

    The body of a loop is multiplied by its trip count, or counts once if the trip count is unknown. A conditional counts as its
    most expensive branch. A kernel counts as the FLOPs that its op reports (`Op.kernel_flops`). If the op reports none, the
    kernel's body counts once per grid point, or the kernel's declared cost counts if the grid is only known at run time.

    Args:
        jaxpr: Jaxpr traced under a `ScopedSelection`.
        scopes: Scopes of that selection.
        times: Number of executions of the jaxpr.
        visible: See `Work`.
        kernel: See `Work`.
        op: The op that encloses the jaxpr.
        gradients: Gradients of the jaxpr to count as well. If None, only the jaxpr itself counts.
    """
    for equation in live_equations(jaxpr):
        name, params = equation.primitive.name, equation.params
        match = _SCOPE.search(str(equation.source_info.name_stack)) if scopes else None
        scope = scopes[int(match[1])] if match else None
        visible_share = visible if visible != 1.0 or scope is None else scope.visible
        inner_op = op if scope is None else scope.op
        products = 1 if gradients is None else gradients.products(equation)
        if name in _KERNELS and (product := _kernel_flops(equation, inner_op)) is not None:
            yield Work(equation, times, visible_share, True, product, products=products)
        elif name == "pallas_call":
            grid = params["grid_mapping"].grid
            if all(isinstance(size, int) for size in grid):
                yield from works(params["jaxpr"], (), times * math.prod(grid), visible_share, True)
            elif params["cost_estimate"] is not None:
                yield Work(equation, times, visible_share, True)
        elif _CUDNN.match(name):
            yield Work(equation, times, visible_share, True)
        elif equation_flops(equation):
            yield Work(equation, times, visible_share, kernel, products=products)
        else:
            more = times * params["length"] if name == "scan" else times
            more *= mapped_devices(params) if name == "shard_map" else 1
            arms = []
            for inner in inner_jaxprs(equation):
                deeper = None if gradients is None else gradients.inside(equation, inner)
                arms.append(list(works(inner, scopes, more, visible_share, kernel, inner_op, deeper)))
            yield from max(arms, key=lambda arm: sum(w.flops for w in arm), default=())


def live_equations(jaxpr: Any) -> list[Any]:
    """Return the equations that affect a result or have a side effect, in order.

    Rematerialized code may contain calls whose results were all saved. The compiler removes those calls as well.
    """
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    result = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or any(v in needed for v in equation.outvars):
            needed.update(v for v in equation.invars if not isinstance(v, Literal))
            result.append(equation)
    return result[::-1]


def _kernel_flops(equation: Any, op: Op[Any] | None) -> float | None:
    """Return the FLOPs of a kernel as reported by its op, or None if the kernel's body has to be counted."""
    if op is None:
        return None
    operands = [v.aval.shape for v in equation.invars if is_array(v.aval) and "float" in str(v.aval.dtype)]
    results = [v.aval.shape for v in equation.outvars]
    return op.kernel_flops(operands, results, opaque=equation.primitive.name != "pallas_call")


@attrs.frozen(kw_only=True)
class ModelFlops:
    """Model FLOPs of one function call, without recomputation.

    Attributes:
        full: FLOPs if attention computes all pairs of positions.
        causal: FLOPs if attention computes only the pairs that the masks allow. A partly masked block counts as half.
    """

    full: float
    causal: float


def model_flops(program: Program, name: str, bucket: Any) -> ModelFlops:
    """Count a function's FLOPs with the reference implementation of each op, independently of any kernel's block sizes.

    A training step counts as its forward pass and the gradients that it needs (`Gradients`), like
    `axlearn_core.compose.Program.model_flops`.
    """
    selection, gradients = _ReferenceSelection(platform=program.platform, target=program.selection(name).target), None
    with use(selection):
        if name == "train":
            args = (program.trained.specs, dict(bucket))
            jaxpr = jax.make_jaxpr(program.function("loss").call)(*args).jaxpr
            gradients = gradients_of_loss(jaxpr, mark_leaves(program.trained_marks, args))
        else:
            jaxpr = _jaxpr(program, name, bucket)
    work = list(works(jaxpr, selection.scopes, gradients=gradients))
    return ModelFlops(full=sum(w.flops for w in work), causal=sum(w.flops * w.visible for w in work))


def executed_flops(program: Program, name: str, bucket: Any) -> Mapping[str, float]:
    """Return the FLOPs of one call on all devices by dtype. Includes recomputation, but not the pairs that kernels skip."""
    chosen = program.selection(name)
    selection = ScopedSelection(platform=program.platform, target=chosen.target, required=chosen.required)
    with program.tracing(name, selection):
        jaxpr = _jaxpr(program, name, bucket)
    total: dict[str, float] = {}
    for work in works(jaxpr, selection.scopes):
        flops = work.flops * (work.visible if work.kernel else 1.0)
        total[work.dtype] = total.get(work.dtype, 0.0) + flops
    return total


def _jaxpr(program: Program, name: str, bucket: Any) -> Any:
    function = program.function(name)
    static = (bucket,) if function.takes_bucket else ()
    return jax.make_jaxpr(lambda *args: function.call(*args, *static))(*program.arguments(name, bucket)).jaxpr


@attrs.frozen(eq=False)
class _ScopedKernel:
    """A wrapper that adds a scope name to a kernel's equations."""

    kernel: Kernel[Any, Any]
    scope: str

    @property
    def tags_result(self) -> bool:
        """Return the wrapped kernel's value."""
        return tags_result(self.kernel)

    def supports(self, op: Any, context: KernelContext) -> str | None:
        """Return the wrapped kernel's answer."""
        return self.kernel.supports(op, context)

    def __call__(self, op: Any) -> Any:
        """Call the wrapped kernel under the scope name."""
        with jax.named_scope(self.scope):
            return self.kernel(op)


@attrs.define(eq=False)
class ScopedSelection(Selection):
    """Selects kernels as usual, and names each equation after the op call that it belongs to.

    Attributes:
        scopes: The op calls, in trace order.
    """

    scopes: list[Scope] = attrs.field(factory=list)

    def choose(self, op: Any, name: str | None = None) -> Any:
        """Choose a kernel, and name its equations."""
        kernel, call = super().choose(op, name), op.abstract()
        self.scopes.append(Scope(call, call.visible()))
        return _ScopedKernel(kernel, f"axlearn_op_{len(self.scopes) - 1}")


class _ReferenceSelection(ScopedSelection):
    """A selection that always uses the reference implementation, even if the config names a kernel."""

    def choose(self, op: Any, name: str | None = None) -> Any:
        """Return the reference implementation, and name its equations."""
        return super().choose(op, REFERENCE)
