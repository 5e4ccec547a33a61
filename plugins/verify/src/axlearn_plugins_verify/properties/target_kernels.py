"""Compare the kernels that a config uses on other hardware with their references, on this machine.

The config is traced for the target, with its original sizes. Each op that does not compute its reference is then computed
alone: with random operands, in the kernel's interpreter, at sizes that the kernel accepts and that do not take long.
"""

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.compose import ModelAndObjective
from axlearn_core.compose.functions import array_function
from axlearn_core.contracts.arrays import is_array
from axlearn_core.contracts.kernels import KernelContext, KernelImplementation
from axlearn_core.contracts.target import Target
from axlearn_core.kernels import selection
from axlearn_core.kernels.selection import REFERENCE, Choice, Selection
from axlearn_core.plugins.targets import load
from axlearn_plugins_verify.prove.contract import Difference, Outcome
from axlearn_plugins_verify.prove.forward import EPSILON, FLOOR, perturbed
from axlearn_plugins_verify.prove.structure import abstract_batch
from axlearn_plugins_verify.prove.training_step import MOVES

FLOPS, BYTES = 2.0**29, 2.0**22
"""Cost of an op call that an interpreter can compute within seconds."""


@attrs.frozen
class KernelCall:
    """An op call with the kernel that a target uses for it.

    Attributes:
        op: The call, with abstract arrays of the original sizes.
        context: Facts about the program on the target.
        implementation: The kernel.
    """

    op: Any
    context: KernelContext
    implementation: KernelImplementation

    @property
    def name(self) -> str:
        """Name of the kernel and its op."""
        return f"{self.implementation.name} of {self.op.name}"

    def unavailable_reason(self) -> str | None:
        """Return why the kernel cannot run on this machine, or None if it can."""
        kernel = self.implementation
        if not kernel.platforms or jax.default_backend() in kernel.platforms or kernel.interpreter:
            return None
        return kernel.hardware_only or f"runs only on {', '.join(kernel.platforms)}, and has no interpreter"

    def accepts(self, op: Any) -> bool:
        """Return whether the kernel supports a call, and the call's shapes fit together."""
        try:
            op.result()
        except (TypeError, ValueError, ZeroDivisionError, AssertionError):
            return False
        kernel: Any = load(self.implementation.load)
        return kernel.supports(op, self.context) is None

    @contextlib.contextmanager
    def activate(self) -> Iterator[Any]:
        """Yield the kernel in a context in which this machine can trace it."""
        kernel, place = load(self.implementation.load), self.implementation.interpreter
        local = jax.default_backend() in self.implementation.platforms
        interpret: Any = contextlib.nullcontext if place is None or local else load(place)
        chosen = Selection(
            platform=self.context.platform,
            target=self.context.target,
            gradients=True,
            declared=lambda op: [self.implementation] if isinstance(self.op, op) else [selection.reference(op)],
        )
        with interpret(), selection.use(chosen):
            yield kernel


def target_calls(config: Any, target: Target) -> tuple[list[KernelCall], list[str]]:
    """Return the kernels that a config uses on a target, and a line for each kernel that is not available.

    Args:
        config: Config before it is shrunk.
        target: Hardware.
    """
    calls: dict[tuple[Any, str], KernelCall] = {}
    missing: dict[str, None] = {}
    for choice in trace_choices(config, target.platform, target.name):
        for name, reason in choice.rejected.items():
            if name == choice.named or "is not installed" in reason:
                missing[f"{name} of {choice.op.name} is not compared: {reason.splitlines()[0]}"] = None
        if choice.name != REFERENCE:
            (kernel,) = (k for k in selection.installed(type(choice.op)) if k.name == choice.name)
            calls[choice.op, choice.name] = KernelCall(choice.op, choice.context, kernel)
    return list(calls.values()), list(missing)


@functools.lru_cache(maxsize=64)
def trace_choices(config: Any, platform: str, target: str = "") -> tuple[Choice, ...]:
    """Return the kernels that the loss of a config selects on a platform, and on a target if it is not empty."""
    kernels = Selection(platform=platform, target=target, required=())
    trained = ModelAndObjective.from_config(config)
    with selection.use(kernels):
        jax.eval_shape(config.functions(trained.model)["loss"].call, trained.specs, abstract_batch(config))
    return tuple(kernels.choices)


def shrink_op(op: Any, accepts: Callable[[Any], bool]) -> Any:
    """Return an op with a small cost, shrinking as few sizes as possible.

    The smallest sizes, such as numbers of rows and heads, shrink first. Sizes that differ stay different, so that groups
    of heads remain groups.

    Args:
        op: Op with abstract arrays.
        accepts: Returns whether a kernel supports a call.
    """
    sizes = {size: size for size in sorted({n for x in _arrays(op) for n in x.shape if n > 1})}
    for size in sizes:
        if _is_cheap(op.resize(sizes)):
            break
        for candidate in _smaller(size):
            smaller = op.resize({**sizes, size: candidate})
            if candidate in sizes.values() or not accepts(smaller):
                continue
            sizes[size] = candidate
            if _is_cheap(smaller):
                break
    return op.resize(sizes)


def _smaller(size: int) -> list[int]:
    """Return halves and powers of two below a size, largest first."""
    powers = {2**n for n in range(1, size.bit_length()) if 2**n < size}
    halves = {size >> n for n in range(1, size.bit_length()) if size % 2**n == 0}
    return sorted((powers | halves) - {1}, reverse=True)


def _is_cheap(op: Any) -> bool:
    return op.flops() <= FLOPS and op.bytes() <= BYTES


def _arrays(op: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(attrs.asdict(op, recurse=False)) if is_array(x)]


def in_float32(op: Any) -> Any:
    """Return an op whose 16-bit arrays are float32 instead."""

    def widen(x: Any) -> Any:
        short = is_array(x) and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        return jax.ShapeDtypeStruct(x.shape, "float32") if short else x

    return attrs.evolve(op, **jax.tree.map(widen, attrs.asdict(op, recurse=False)))


def compare_call(call: KernelCall, seed: int) -> Outcome:
    """Compare a kernel with its reference: results, and the gradients of every operand.

    Args:
        call: Call with a kernel that this machine can run.
        seed: Seed for the operands.
    """
    small = shrink_op(call.op, call.accepts)
    outcome = _compare(call, small, seed)
    wide = in_float32(small)
    if outcome.holds and wide != small and call.accepts(wide):
        precise = _compare(call, wide, seed)
        outcome = attrs.evolve(precise, compared=f"{outcome.compared}, also in float32")
    return outcome


def _compare(call: KernelCall, op: Any, seed: int) -> Outcome:
    sample = op.sample(np.random.default_rng((seed, zlib.crc32(str(op).encode()))))
    leaves, tree = jax.tree.flatten(attrs.asdict(sample, recurse=False))
    floats = {str(i): x for i, x in enumerate(leaves) if is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)}
    names = _names(sample)

    def evaluate(kernel: Callable[[Any], Any]) -> Callable[[Mapping[str, Any]], Any]:
        def loss(floats: Mapping[str, Any]) -> tuple[Any, Any]:
            values = [floats.get(str(i), x) for i, x in enumerate(leaves)]
            result = kernel(attrs.evolve(sample, **tree.unflatten(values)))
            rng = np.random.default_rng(0)
            parts = [jnp.sum(x.astype(jnp.float32) * jnp.asarray(rng.normal(size=x.shape), jnp.float32))
                     for x in jax.tree.leaves(result)]  # fmt: skip
            return sum(parts, start=jnp.zeros(())), result

        def compute(floats: Mapping[str, Any]) -> dict[str, Any]:
            (_, result), gradients = jax.value_and_grad(loss, has_aux=True)(floats)
            results = jax.tree.leaves(result)
            place = ("",) if len(results) == 1 else tuple(f" {i}" for i in range(len(results)))
            outputs = {f"output{p}": x for p, x in zip(place, results, strict=True)}
            return {**outputs, **{f"gradient of {names[i]}": g for i, g in gradients.items()}}

        return lambda floats: jax.device_get(array_function()(compute)(floats))

    reference = evaluate(lambda op: op.reference())
    with call.activate() as kernel:
        actual = evaluate(kernel)(floats)
    expected = reference(floats)
    dtype = min((str(x.dtype) for x in floats.values()), key=lambda d: jnp.dtype(d).itemsize, default="float32")
    moved = [reference(perturbed(floats, EPSILON[dtype], n)) for n in range(MOVES)]
    tolerance = max(FLOOR[dtype], 4 * max(max(_errors(expected, m).values()) for m in moved))
    errors = _errors(expected, actual)
    shapes = ", ".join("x".join(map(str, x.shape)) for x in op.operands().values())
    wrong = [name for name, error in errors.items() if not error <= tolerance]
    difference = None
    if wrong:
        detail = f"{call.implementation.name} on {call.context.target or call.context.platform}, operands {shapes}"
        difference = Difference(layer=op.name, tensor=wrong[0], error=errors[wrong[0]], detail=detail)
    return Outcome(
        error=errors[wrong[0]] if wrong else max(errors.values()),
        tolerance=tolerance,
        compared=f"{call.name} ({shapes})",
        difference=difference,
    )


def _names(op: Any) -> dict[str, str]:
    """Return the name of each array of an op by its index among the leaves."""
    paths = jax.tree_util.tree_leaves_with_path(attrs.asdict(op, recurse=False))
    return {str(i): jax.tree_util.keystr(path, simple=True, separator=".") for i, (path, _) in enumerate(paths)}


def _errors(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> dict[str, float]:
    """Return the error of each array, relative to its norm."""
    errors = {}
    for name in sorted(expected, key=lambda name: (name.startswith("gradient"), name)):  # JAX sorts them by name
        exact, other = np.asarray(expected[name], np.float64), np.asarray(actual[name], np.float64)
        norm = float(np.linalg.norm(exact))
        error = float(np.linalg.norm(other - exact)) / (norm or 1.0)
        errors[name] = error if np.isfinite(error) else float("inf")
    return errors
