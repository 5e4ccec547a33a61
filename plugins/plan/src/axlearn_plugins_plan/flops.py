"""Floating-point operations of a program, read from its jaxpr, kernels included.

Two conventions for attention stand beside one another: *full* counts all pairs of positions, as most published
utilisations do (Chowdhery et al., 2022, appendix B); *causal* only those that the mask lets through.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import jax

from axlearn_core.compose import Program
from axlearn_core.compose.flops import called, equation_flops
from axlearn_core.contracts.kernels import Kernel, OpRequest
from axlearn_core.kernels.selection import REFERENCE, Selection, use

BLOCKS = 64  # a mask is asked about this many blocks of queries and of keys
_SCOPE = re.compile(r"visible_pairs_([\d.]+)")
_PRODUCT = re.compile(r"grouped_product_(\d+)")
_LOSS = "output_layer_and_loss"
_KERNELS = ("pallas_call", "mpmd_map")  # the latter is Mosaic GPU's, and that of TPU kernels which name their cores
_CUDNN = re.compile(r"dot_product_attention_(?:fp8_)?(fwd|bwd)")


@attrs.frozen
class Work:
    """An equation that computes, and how often it runs.

    Attributes:
        times: in one step, on all devices together.
        visible: the share of the pairs of positions that the mask of the attention around it lets through.
        kernel: whether it is in a kernel, which skips what no mask lets through.
        product: the FLOPs of one run, where a kernel's body does not tell: of a grouped product, whose grid has all groups for
            all rows, and which of those it skips only the data tell; and where `_by_shapes` knows better.
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
        if found := _CUDNN.match(name):
            query, key, value = (self.equation.invars[i].aval.shape for i in range(3))
            batch, length, heads, size = query  # the layout BTNH, the only one that JAX passes on
            forward = 2 * batch * heads * length * key[1] * (size + value[3])
            return self.times * forward * (1 if found[1] == "fwd" else 2.5)  # five products for two
        return self.times * equation_flops(self.equation)

    @property
    def dtype(self) -> str:
        """Of what is multiplied: the narrower of both sides."""
        operands = [v.aval for v in self.equation.invars if hasattr(v.aval, "dtype")]
        operands = [a for a in operands if a.ndim > 1] or operands  # a kernel has offsets among its operands
        return str(min((a.dtype for a in operands[:2]), key=lambda d: d.itemsize)) if operands else "float32"


def works(
    jaxpr: Any, times: float = 1, visible: float = 1.0, kernel: bool = False, product: float | str | None = None
) -> Iterator[Work]:
    """All equations of a jaxpr that compute, those of what it calls too, loops times their trip counts.

    A `while` of unknown length counts once, a branch as its most expensive arm. A kernel's body counts once for each
    point of its grid; where the grid is known at run time only, what the kernel declares to cost. Each kernel of the op
    `grouped_matmul`, forward or backward, counts as one product of all its rows, and some kernels by their operands.
    """
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        scope = _SCOPE.search(str(equation.source_info.name_stack))
        seen = visible if visible != 1.0 or not scope else float(scope[1])
        scope = _PRODUCT.search(str(equation.source_info.name_stack))
        given = float(scope[1]) if scope else _LOSS if _LOSS in str(equation.source_info.name_stack) else product
        if name == "cond":
            arms = [list(works(b.jaxpr, times, seen, kernel, given)) for b in params["branches"]]
            yield from max(arms, key=lambda arm: sum(w.flops for w in arm))
        elif name == "scan":
            yield from works(params["jaxpr"].jaxpr, times * params["length"], seen, kernel, given)
        elif name == "while":
            yield from works(params["body_jaxpr"].jaxpr, times, seen, kernel, given)
        elif name == "shard_map":
            manual = params.get("manual_axes") or params["mesh"].axis_names
            devices = math.prod(params["mesh"].shape[a] for a in manual)
            yield from works(params["jaxpr"], times * devices, seen, kernel, given)
        elif (
            name in _KERNELS
            and (done := given if isinstance(given, (int, float)) else _by_shapes(equation, given)) is not None
        ):
            yield Work(equation, times, seen, True, done)
        elif name == "pallas_call":
            grid = params["grid_mapping"].grid
            if all(isinstance(size, int) for size in grid):
                yield from works(params["jaxpr"], times * math.prod(grid), seen, True)
            elif params["cost_estimate"] is not None:
                yield Work(equation, times, seen, True)
        elif _CUDNN.match(name):
            yield Work(equation, times, seen, True)
        elif equation_flops(equation):
            yield Work(equation, times, seen, kernel)
        elif (inner := called(params)) is not None:
            yield from works(inner, times, seen, kernel, given)


def _by_shapes(equation: Any, scope: str | None) -> float | None:
    """The FLOPs of a kernel by its operands, where its body has other products than it does; None for all others.

    Those in Mosaic GPU multiply by instructions of their own: attention of [B, T, H, D], and gated units [M, K] x [K, 2, N]. The
    output layer with its loss, on TPUs, takes one product of [T, D] x [D, V] forward and three backward, and its body has more
    of them, each for some steps of the grid.
    """
    arrays = [v.aval.shape for v in equation.invars if "float" in str(getattr(v.aval, "dtype", ""))]
    if scope == _LOSS:
        rows, weight = (a for a in arrays if len(a) == 2)
        return 2.0 * rows[0] * math.prod(weight) * (3 if len(equation.outvars[0].aval.shape) > 1 else 1)
    if equation.primitive.name == "pallas_call":
        return None
    heads = [a for a in arrays if len(a) == 4]
    if len(heads) < 3:
        return 2.0 * arrays[0][0] * math.prod(arrays[1])
    (batch, length, number, size), key, value = heads[:3]
    # Forward without a gradient among its operands; backward a kernel for all three, one for the queries, one for the others.
    products = 2 if len(heads) == 3 else {0: 5, 1: 3, 2: 4}[len(equation.outvars)]
    return 1.0 * products * batch * length * number * key[1] * (size + value[3])


@attrs.frozen(kw_only=True)
class ModelFlops:
    """What the mathematics of one training step takes: three times the forward pass, no recomputation.

    Attributes:
        full: with all pairs of positions in attention.
        causal: with those that the masks let through, a block that lets through some of its pairs counted as half.
    """

    full: float
    causal: float


def model_flops(program: Program, batch: Mapping[str, Any]) -> ModelFlops:
    """Counted with the reference implementations of all ops, so that no kernel's choice of blocks plays a part."""
    selection = _Reference(platform=program.platform, target=program.selection("train").target)
    with use(selection):
        jaxpr = jax.make_jaxpr(program.function("loss").call)(program.functional.specs, dict(batch)).jaxpr
    found = list(works(jaxpr))
    return ModelFlops(full=3 * sum(w.flops for w in found), causal=3 * sum(w.flops * w.visible for w in found))


def executed_flops(program: Program, batch: Mapping[str, Any]) -> Mapping[str, float]:
    """Dtype -> FLOPs that the program asks for in one step, on all devices: recomputation too, kernels without the pairs
    of positions that they skip.
    """
    selection = _Marked(platform=program.platform, target=program.selection("train").target)
    with program.tracing("train", selection):
        jaxpr = jax.make_jaxpr(program.function("train").call)(program.state, dict(batch)).jaxpr
    total: dict[str, float] = {}
    for work in works(jaxpr):
        done = work.flops * (work.visible if work.kernel else 1.0)
        total[work.dtype] = total.get(work.dtype, 0.0) + done
    return total


def visible_pairs(mask: Any, queries: int, keys: int) -> float:
    """The share of (query, key) pairs that a mask lets through, as far as its structure tells.

    Parts that depend on the data (segments, prefixes) count as if they let everything through: rows of one document.
    """
    parts = [p for p in getattr(mask, "parts", (mask,)) if hasattr(p, "block") and not jax.tree.leaves(p)]
    if not parts or queries != keys:
        return 1.0
    blocks = max(1, min(BLOCKS, queries))
    edges = [i * queries // blocks for i in range(blocks + 1)]
    ranges = list(itertools.pairwise(edges))
    seen = 0.0
    for rows in ranges:
        for columns in ranges:
            answers = [part.block(rows, columns) for part in parts]
            share = 0.0 if False in answers else 1.0 if all(answers) else 0.5
            seen += share * (rows[1] - rows[0]) * (columns[1] - columns[0])
    return seen / (queries * keys)


@attrs.frozen(eq=False)
class _Scoped:
    """A kernel whose equations carry what it computes in their names, which changes nothing else."""

    kernel: Any
    scope: Callable[..., str]

    def supports(self, request: OpRequest) -> str | None:
        """As the kernel."""
        return self.kernel.supports(request)

    def __call__(self, *operands: Any, **options: Any) -> Any:
        """As the kernel."""
        with jax.named_scope(self.scope(*operands, **options)):
            return self.kernel(*operands, **options)


def _pairs(query: Any, key: Any, *_: Any, mask: Any, **__: Any) -> str:
    return f"visible_pairs_{visible_pairs(mask, query.shape[1], key.shape[1]):.6f}"


def _product(lhs: Any, rhs: Any, *_: Any) -> str:
    return f"grouped_product_{2 * lhs.size * rhs.shape[2]}"


def _loss(*_: Any, **__: Any) -> str:
    return _LOSS


class _Marked(Selection):
    """The usual choice."""

    def choose(self, request: OpRequest, name: str | None = None) -> Kernel:
        """The kernel, its equations marked."""
        kernel = super().choose(request, name)
        if request.op == "grouped_matmul":
            return _Scoped(kernel, _product)
        if request.op == "cross_entropy":
            return _Scoped(kernel, _loss)
        return _Scoped(kernel, _pairs) if request.op == "attention" and request.options.get("aligned") else kernel


class _Reference(_Marked):
    """The reference of each op that has one, whatever the config names."""

    def choose(self, request: OpRequest, name: str | None = None) -> Kernel:
        """The reference, its equations marked."""
        has = any(k.name == REFERENCE for k in self.declared(request.op))
        return super().choose(request, REFERENCE if has else name)
