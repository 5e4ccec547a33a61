"""Floating-point operations of a program, read from its jaxpr, kernels included.

Two conventions for attention stand beside one another: *full* counts all pairs of positions, as most published
utilisations do (Chowdhery et al., 2022, appendix B); *causal* only those that the mask lets through.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import jax
from jax.extend.core import Literal

from axlearn_core.compose import Program
from axlearn_core.compose.flops import called, equation_flops, mapped_devices
from axlearn_core.contracts.arrays import is_array
from axlearn_core.contracts.kernels import Kernel, KernelContext, tags_result
from axlearn_core.kernels.op import Op
from axlearn_core.kernels.selection import REFERENCE, Selection, use

R = TypeVar("R")

_SCOPE = re.compile(r"axlearn_op_(\d+)")
_KERNELS = ("pallas_call", "mpmd_map", "ffi_call")
"""`mpmd_map` is Mosaic GPU's, and that of TPU kernels which name their cores; `ffi_call` calls a compiled library."""
_CUDNN = re.compile(r"dot_product_attention_(?:fp8_)?(fwd|bwd)")


@attrs.frozen
class Work:
    """An equation that computes, and how often it runs.

    Attributes:
        times: in one step, on all devices together.
        visible: the share of the pairs of positions that the mask of the attention around it lets through.
        kernel: whether it is in a kernel, which skips what no mask lets through.
        product: the FLOPs of one run, where the op knows better than the kernel's body (`Op.kernel_flops`).
    """

    equation: Any
    times: float
    visible: float
    kernel: bool
    product: float | None = None

    @property
    def flops(self) -> float:
        """Of all its runs, as if every pair of positions were visible; a multiply-add is two."""
        name, params = self.equation.primitive.name, self.equation.params
        if self.product is not None:
            return self.times * self.product
        if name == "pallas_call":
            return self.times * params["cost_estimate"].flops
        if match := _CUDNN.match(name):
            query, key, value = (self.equation.invars[i].aval.shape for i in range(3))
            batch, length, heads, size = query  # the layout BTNH, the only one that JAX passes on
            forward = 2 * batch * heads * length * key[1] * (size + value[3])
            return self.times * forward * (1 if match[1] == "fwd" else 2.5)  # five products for two
        return self.times * equation_flops(self.equation)

    @property
    def dtype(self) -> str:
        """Of what is multiplied: the narrower of both sides."""
        operands = [v.aval for v in self.equation.invars if is_array(v.aval)]
        operands = [a for a in operands if a.ndim > 1] or operands  # a kernel has offsets among its operands
        return str(min((a.dtype for a in operands[:2]), key=lambda d: d.itemsize)) if operands else "float32"


@attrs.frozen
class Scope:
    """A call of an op, which the names of its equations lead to.

    Attributes:
        op: the call, without values.
        visible: the share of its FLOPs that its mathematics needs.
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
) -> Iterator[Work]:
    """All equations of a jaxpr that compute, those of what it calls too, loops times their trip counts; no dead ones.

    A `while` of unknown length counts once, a branch as its most expensive arm. A kernel counts by its op where that
    knows (`Op.kernel_flops`), else its body once for each point of its grid; where the grid is known at run time only,
    what the kernel declares to cost.

    Args:
        jaxpr: traced under a `ScopedSelection`.
        scopes: of that selection.
        times: how often the jaxpr runs.
        visible: see `Work`.
        kernel: see `Work`.
        op: the op around the jaxpr.
    """
    for equation in live_equations(jaxpr):
        name, params = equation.primitive.name, equation.params
        match = _SCOPE.search(str(equation.source_info.name_stack)) if scopes else None
        scope = scopes[int(match[1])] if match else None
        visible_share = visible if visible != 1.0 or scope is None else scope.visible
        of = op if scope is None else scope.op
        if name == "cond":
            arms = [list(works(b.jaxpr, scopes, times, visible_share, kernel, of)) for b in params["branches"]]
            yield from max(arms, key=lambda arm: sum(w.flops for w in arm))
        elif name == "scan":
            yield from works(params["jaxpr"].jaxpr, scopes, times * params["length"], visible_share, kernel, of)
        elif name == "while":
            yield from works(params["body_jaxpr"].jaxpr, scopes, times, visible_share, kernel, of)
        elif name == "shard_map":
            yield from works(params["jaxpr"], scopes, times * mapped_devices(params), visible_share, kernel, of)
        elif name in _KERNELS and (product := _kernel_flops(equation, of)) is not None:
            yield Work(equation, times, visible_share, True, product)
        elif name == "pallas_call":
            grid = params["grid_mapping"].grid
            if all(isinstance(size, int) for size in grid):
                yield from works(params["jaxpr"], (), times * math.prod(grid), visible_share, True)
            elif params["cost_estimate"] is not None:
                yield Work(equation, times, visible_share, True)
        elif _CUDNN.match(name):
            yield Work(equation, times, visible_share, True)
        elif equation_flops(equation):
            yield Work(equation, times, visible_share, kernel)
        elif (inner := called(params)) is not None:
            yield from works(inner, scopes, times, visible_share, kernel, of)


def live_equations(jaxpr: Any) -> list[Any]:
    """The equations that a result needs, and those with an effect, in their order.

    What the backward pass recomputes may hold calls whose results were all kept: the compiler takes them out.
    """
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    result = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or any(v in needed for v in equation.outvars):
            needed.update(v for v in equation.invars if not isinstance(v, Literal))
            result.append(equation)
    return result[::-1]


def _kernel_flops(equation: Any, op: Op[Any] | None) -> float | None:
    """The FLOPs of a kernel by its op; None where its body tells."""
    if op is None:
        return None
    operands = [v.aval.shape for v in equation.invars if is_array(v.aval) and "float" in str(v.aval.dtype)]
    results = [v.aval.shape for v in equation.outvars]
    return op.kernel_flops(operands, results, opaque=equation.primitive.name != "pallas_call")


@attrs.frozen(kw_only=True)
class ModelFlops:
    """What the mathematics of one call of a function takes, without recomputation.

    Attributes:
        full: with all pairs of positions in attention.
        causal: with those that the masks let through, a block that lets through some of its pairs counted as half.
    """

    full: float
    causal: float


def model_flops(program: Program, name: str, bucket: Any) -> ModelFlops:
    """Counts a function's FLOPs with the reference of each op, so that no kernel's choice of blocks plays a part.

    A training step counts as three forward passes.
    """
    selection = _ReferenceSelection(platform=program.platform, target=program.selection(name).target)
    passes = 3 if name == "train" else 1
    with use(selection):
        if name == "train":
            jaxpr = jax.make_jaxpr(program.function("loss").call)(program.trained.specs, dict(bucket)).jaxpr
        else:
            jaxpr = _jaxpr(program, name, bucket)
    work = list(works(jaxpr, selection.scopes))
    full, causal = sum(w.flops for w in work), sum(w.flops * w.visible for w in work)
    return ModelFlops(full=passes * full, causal=passes * causal)


def executed_flops(program: Program, name: str, bucket: Any) -> Mapping[str, float]:
    """Dtype -> FLOPs that the program asks for in one call, on all devices: recomputation too, kernels without the pairs
    of positions that they skip.
    """
    own = program.selection(name)
    selection = ScopedSelection(platform=program.platform, target=own.target, required=own.required)
    with program.tracing(name, selection):
        jaxpr = _jaxpr(program, name, bucket)
    total: dict[str, float] = {}
    for work in works(jaxpr, selection.scopes):
        flops = work.flops * (work.visible if work.kernel else 1.0)
        total[work.dtype] = total.get(work.dtype, 0.0) + flops
    return total


def _jaxpr(program: Program, name: str, bucket: Any) -> Any:
    function = program.function(name)
    static = (bucket,) if function.by_bucket else ()
    return jax.make_jaxpr(lambda *args: function.call(*args, *static))(*program.arguments(name, bucket)).jaxpr


@attrs.frozen(eq=False)
class _ScopedKernel:
    """A kernel whose equations carry a name, which changes nothing else."""

    kernel: Kernel[Any, Any]
    scope: str

    @property
    def tags_result(self) -> bool:
        """As the kernel."""
        return tags_result(self.kernel)

    def supports(self, op: Any, context: KernelContext) -> str | None:
        """As the kernel."""
        return self.kernel.supports(op, context)

    def __call__(self, op: Any) -> Any:
        """As the kernel."""
        with jax.named_scope(self.scope):
            return self.kernel(op)


@attrs.define(eq=False)
class ScopedSelection(Selection):
    """The usual choice of kernels; the names of their equations say which call they belong to.

    Attributes:
        scopes: the calls, in the order of the trace.
    """

    scopes: list[Scope] = attrs.field(factory=list)

    def choose(self, op: Any, name: str | None = None) -> Any:
        """The kernel, its equations named."""
        kernel, call = super().choose(op, name), op.abstract()
        self.scopes.append(Scope(call, call.visible()))
        return _ScopedKernel(kernel, f"axlearn_op_{len(self.scopes) - 1}")


class _ReferenceSelection(ScopedSelection):
    """Uses the reference of each op, regardless of what the config names."""

    def choose(self, op: Any, name: str | None = None) -> Any:
        """The reference, its equations named."""
        return super().choose(op, REFERENCE)
