"""Count the FLOPs of a function from its jaxpr. XLA's count includes the body of a scan only once."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from axlearn_core.contracts.arrays import is_array

Variable = Var | Literal
"""An operand or a result of an equation."""


def count_flops(function: Callable[..., Any], *args: object, trained: object = False) -> int:
    """Return the FLOPs of the matrix multiplications and convolutions in `function(*args)`. A multiply-add counts as two.

    The body of a scan counts once per iteration, and the body of a `while` loop counts once. Only the most expensive branch of
    a conditional counts.

    Args:
        function: A traceable function.
        args: Its arguments, which may be abstract.
        trained: Tree prefix of `args` (a bool, or a tuple with an entry for each argument) that is True for the arrays that
            training updates. If any is True, the first result is the loss, and the products of its backward pass are counted too.
    """
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return _count(jaxpr, gradients_of_loss(jaxpr, mark_leaves(trained, args)))


def mark_leaves(marks: object, args: tuple[object, ...]) -> list[bool]:
    """Expand a tree prefix of bools to one bool for each array of `args`."""
    marks = (marks,) * len(args) if isinstance(marks, bool) else marks
    return jax.tree.leaves(jax.tree.map(lambda mark, part: jax.tree.map(lambda _: mark, part), marks, args))


def equation_flops(eqn: Any) -> int:
    """Return the FLOPs of one equation of a jaxpr, excluding jaxprs that it calls."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        contracted = math.prod(eqn.invars[0].aval.shape[d] for d in params["dimension_numbers"][0][0])
        return 2 * contracted * math.prod(eqn.outvars[0].aval.shape)
    if name == "ragged_dot_general":  # each row is multiplied by one matrix, even if groups split the contraction
        ragged = params["ragged_dot_dimension_numbers"]
        lhs, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        summed = ragged.dot_dimension_numbers[0][0]
        groups = out[0] if ragged.lhs_ragged_dimensions[0] in summed else 1
        return 2 * math.prod(lhs[d] for d in summed) * math.prod(out) // groups
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        out_features = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) // out_features
    return 0


def loop_carries(eqn: Any, body: Any) -> tuple[int, int]:
    """Return (index of the first carried input of a loop's body, number of carried values), or zeros if there is no loop.

    Args:
        eqn: An equation of a jaxpr.
        body: The jaxpr that it calls.
    """
    if eqn.primitive.name == "while":
        return eqn.params["body_nconsts"], len(eqn.outvars)
    if eqn.primitive.name != "scan":
        return 0, 0
    # The equation parameters that hold these counts depend on the JAX version. Scanned operands and stacked results have one
    # more axis outside the body.
    scanned = sum(o.aval.ndim != i.aval.ndim for o, i in zip(eqn.invars, body.invars, strict=True))
    carried = sum(o.aval.ndim == i.aval.ndim for o, i in zip(eqn.outvars, body.outvars, strict=True))
    return len(eqn.invars) - carried - scanned, carried


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return the jaxprs whose results become the results of an equation: branches, the body of a loop, or a called jaxpr."""
    name, params = eqn.primitive.name, eqn.params
    if name == "cond":
        return [branch.jaxpr for branch in params["branches"]]
    if name == "while":
        return [params["body_jaxpr"].jaxpr]
    inner = called(params)
    return [] if inner is None else [inner]


def called(params: Mapping[str, Any]) -> Jaxpr | None:
    """Return the jaxpr that an equation calls once (jit, remat, custom derivatives, or batching), or None."""
    values = (params.get(name) for name in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"))
    return next((jaxpr for value in values if (jaxpr := get_jaxpr(value)) is not None), None)


def get_jaxpr(value: object) -> Jaxpr | None:
    """Return the jaxpr of an equation's parameter, or None for other parameters."""
    value = value.jaxpr if isinstance(value, ClosedJaxpr) else value
    return value if isinstance(value, Jaxpr) else None


def mapped_devices(params: Mapping[str, Any]) -> int:
    """Return the number of devices that a `shard_map` splits its work over. Axes that are not manual do not count.

    The name of the parameter depends on the version of JAX.
    """
    names = ("newly_manual_axes", "manual_axes")
    axes = next((params[name] for name in names if name in params), params["mesh"].axis_names)
    return math.prod(params["mesh"].shape[axis] for axis in axes)


class Gradients:
    """Determines which products of a jaxpr the backward pass of a loss needs.

    The gradient of an operand of a product takes as many FLOPs as the product itself. It is needed if the operand depends on an
    array that training updates, and if the loss depends on the product. A product of two such operands counts three times. A
    product of an activation and a frozen weight counts twice, or once if nothing before it is trained.

    All iterations of a loop are treated alike: a value that depends on a trained array in one iteration is assumed to do so in
    all of them.

    Attributes:
        dependent: Variables that depend on trained arrays.
        needed: Variables that the loss depends on.
    """

    def __init__(self, jaxpr: Jaxpr, inputs: Sequence[bool], outputs: Sequence[bool]):
        """Trace how values depend on each other in a jaxpr.

        Args:
            jaxpr: The jaxpr.
            inputs: For each input, whether it depends on trained arrays.
            outputs: For each output, whether the loss depends on it.
        """
        self.dependent = _follow(jaxpr, inputs)
        self.needed = _trace_back(jaxpr, outputs) if self.dependent else set()

    def products(self, eqn: JaxprEqn) -> int:
        """Return how many times a product counts: once forward, and once for each operand that needs a gradient."""
        if not any(_marks(eqn.outvars, self.needed)):
            return 1
        return 1 + sum(_marks(eqn.invars[:2], self.dependent))

    def inside(self, eqn: JaxprEqn, jaxpr: Jaxpr) -> "Gradients":
        """Return the `Gradients` for a jaxpr that an equation calls."""
        inputs, outputs = _marks(eqn.invars, self.dependent), _marks(eqn.outvars, self.needed)
        if not _matches(eqn, jaxpr):
            return Gradients(jaxpr, [any(inputs)] * len(jaxpr.invars), [any(outputs)] * len(jaxpr.outvars))
        return Gradients(jaxpr, _loop_inputs(eqn, jaxpr, inputs), _loop_outputs(eqn, jaxpr, outputs))


def gradients_of_loss(jaxpr: Jaxpr, trained: Sequence[bool]) -> Gradients:
    """Return the `Gradients` for a jaxpr's first result with respect to its trained inputs."""
    return Gradients(jaxpr, trained, [True] + [False] * (len(jaxpr.outvars) - 1))


def _marks(variables: Sequence[Variable], marked: Collection[Variable]) -> list[bool]:
    return [not isinstance(v, Literal) and v in marked for v in variables]


def _marked(variables: Sequence[Variable], marks: Sequence[bool]) -> set[Variable]:
    """Return the marked variables that can have a gradient."""
    pairs = zip(variables, marks, strict=True)
    return {v for v, mark in pairs if mark and not isinstance(v, Literal) and _is_float(v.aval)}


def _is_float(aval: object) -> bool:
    return is_array(aval) and jnp.issubdtype(aval.dtype, jnp.inexact)


def _follow(jaxpr: Jaxpr, inputs: Sequence[bool]) -> set[Variable]:
    """Return the variables that depend on the marked inputs."""
    marked = _marked(jaxpr.invars, inputs)
    for eqn in jaxpr.eqns if marked else ():
        operands = _marks(eqn.invars, marked)
        if not any(operands) or eqn.primitive.name == "stop_gradient":
            continue
        results = [True] * len(eqn.outvars)
        if inner := [j for j in inner_jaxprs(eqn) if _matches(eqn, j)]:
            followed = [_marks(j.outvars, _follow(j, _loop_inputs(eqn, j, operands))) for j in inner]
            results = [any(marks) for marks in zip(*followed, strict=True)]
        marked |= _marked(eqn.outvars, results)
    return marked


def _trace_back(jaxpr: Jaxpr, outputs: Sequence[bool]) -> set[Variable]:
    """Return the variables that the marked outputs depend on."""
    marked = _marked(jaxpr.outvars, outputs)
    for eqn in reversed(jaxpr.eqns) if marked else ():
        results = _marks(eqn.outvars, marked)
        if not any(results) or eqn.primitive.name == "stop_gradient":
            continue
        operands = [True] * len(eqn.invars)
        if inner := [j for j in inner_jaxprs(eqn) if _matches(eqn, j)]:
            traced = [_marks(j.invars, _trace_back(j, _loop_outputs(eqn, j, results))) for j in inner]
            skipped = [False] * _skipped(eqn)
            operands = [*skipped, *(any(marks) for marks in zip(*traced, strict=True))]
        marked |= _marked(eqn.invars, operands)
    return marked


def _matches(eqn: JaxprEqn, jaxpr: Jaxpr) -> bool:
    """Return True if the operands and results of an equation are the inputs and outputs of a jaxpr that it calls."""
    inputs = len(eqn.invars) - _skipped(eqn)
    return len(jaxpr.invars) == inputs and len(jaxpr.outvars) == len(eqn.outvars)


def _skipped(eqn: JaxprEqn) -> int:
    """Return the number of leading operands that are not inputs of the called jaxprs."""
    return {"cond": 1, "while": eqn.params.get("cond_nconsts", 0)}.get(eqn.primitive.name, 0)


def _loop_inputs(eqn: JaxprEqn, jaxpr: Jaxpr, operands: Sequence[bool]) -> list[bool]:
    """Return the marks of a called jaxpr's inputs. For a loop, repeat until the marks of the carried values stop changing."""
    inputs, (first, count) = list(operands[_skipped(eqn) :]), loop_carries(eqn, jaxpr)
    while count:
        carried = _marks(jaxpr.outvars[:count], _follow(jaxpr, inputs))
        merged = [a or b for a, b in zip(inputs[first : first + count], carried, strict=True)]
        if merged == inputs[first : first + count]:
            break
        inputs[first : first + count] = merged
    return inputs


def _loop_outputs(eqn: JaxprEqn, jaxpr: Jaxpr, results: Sequence[bool]) -> list[bool]:
    """Return the marks of a called jaxpr's outputs. For a loop, repeat until the marks of the carried values stop changing."""
    outputs, (first, count) = list(results), loop_carries(eqn, jaxpr)
    while count:
        carried = _marks(jaxpr.invars[first : first + count], _trace_back(jaxpr, outputs))
        merged = [a or b for a, b in zip(outputs[:count], carried, strict=True)]
        if merged == outputs[:count]:
            break
        outputs[:count] = merged
    return outputs


def _count(jaxpr: Jaxpr, gradients: Gradients) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        total += equation_flops(eqn) * gradients.products(eqn)
        counts = [_count(inner, gradients.inside(eqn, inner)) for inner in inner_jaxprs(eqn)]
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        if eqn.primitive.name == "shard_map":
            times = mapped_devices(eqn.params)
        total += times * max(counts, default=0)
    return total
