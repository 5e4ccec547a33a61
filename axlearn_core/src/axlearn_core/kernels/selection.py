"""Chooses the kernel for each call of an op.

A program puts its selection in force while it is traced, and keeps the choice at each call site. Outside of a program
the reference runs. A layer whose config names a kernel gets that one, or an error. A function that only shares the config
(generation shares it with the training step, for which the kernel was named) gets it if it can have it.
"""

import contextlib
import contextvars
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import jax

from axlearn_core.contracts.kernels import Call, Kernel, KernelContext, KernelImplementation
from axlearn_core.errors import PluginError, RequestError, nearest
from axlearn_core.plugins.targets import load

R = TypeVar("R")
OpClass = type[Call[Any]]

REFERENCE = "xla"


class _Reference:
    """The kernel that computes any op by its reference."""

    def supports(self, op: Call[Any], context: KernelContext) -> str | None:
        """Everything."""
        return None

    def __call__(self, op: Call[R]) -> R:
        """Computes the reference."""
        return op.reference()


REFERENCE_KERNEL = _Reference()


def reference(op: OpClass) -> KernelImplementation:
    """The implementation `xla`, which every op has: its reference, with priority 0."""
    return KernelImplementation(name=REFERENCE, op=op.path(), load=f"{__name__}:REFERENCE_KERNEL")


def installed(op: OpClass) -> Sequence[KernelImplementation]:
    """The reference of an op and the kernels that installed plugins declare for it.

    Raises:
        PluginError: two claim a name.
    """
    from axlearn_core.plugins.manager import host  # loads plugins: only when a program asks

    path = op.path()
    claims = {REFERENCE: ("the op itself", reference(op))}
    for origin, declared in host().answers("axlearn_kernels"):
        for implementation in declared:
            if implementation.op != path:
                continue
            if other := claims.get(implementation.name):
                raise PluginError(
                    f"the {op.name} kernel {implementation.name!r} is claimed by {other[0]} and by {origin}"
                )
            claims[implementation.name] = (origin, implementation)
    return [implementation for _, implementation in claims.values()]


def import_kernels(kernels: Iterable[tuple[str, str]]) -> None:
    """Imports kernels by (path of the op, name), as a trace would: their modules may register what compiled programs call.

    Raises:
        RequestError: no installed plugin declares one.
        PluginError: one cannot be imported.
    """
    from axlearn_core.plugins.manager import host  # as above

    declared = {(k.op, k.name): k for _, answer in host().answers("axlearn_kernels") for k in answer}
    for op, name in kernels:
        if name == REFERENCE:
            continue
        if (op, name) not in declared:
            raise RequestError(
                f"a compiled program has the kernel {name!r} of {op}, which no installed plugin declares\n"
                "    fix: install the plugin that has it, or compile again without it"
            )
        _import(declared[op, name], op)


def kernel_tags() -> set[str]:
    """The activation tags of the kernels that installed plugins declare."""
    from axlearn_core.plugins.manager import host  # as above

    return {tag for _, declared in host().answers("axlearn_kernels") for kernel in declared for tag in kernel.tags}


@attrs.frozen(kw_only=True)
class Choice:
    """The kernel of a call site, and why others were not taken. Kept in run locks.

    Attributes:
        op: the call, without values.
        context: the program around it.
        name: the kernel.
        rejected: name -> reason, of kernels with a higher priority, and of one that the config names.
        named: the kernel that the config names; None if it leaves the choice open.
        compiler_options: XLA's options that the kernel needs for the whole program.
    """

    op: Call[Any]
    context: KernelContext
    name: str
    rejected: Mapping[str, str]
    named: str | None = None
    compiler_options: Mapping[str, Any] = {}

    @property
    def call(self) -> str:
        """The call in words: `rms_norm(x float32[4, 64, 16], ...) on cpu`."""
        return f"{self.op} on {self.context.platform}"

    def __str__(self) -> str:  # the form of run locks, which are compared between versions
        shapes = {name: tuple(x.shape) for name, x in self.op.operands().items()}
        request = (
            f"OpRequest(op={self.op.name!r}, platform={self.context.platform!r}, shapes={shapes}, "
            f"dtypes={self.op.dtypes}, options={dict(self.op.options())}, gradients={self.context.gradients}, "
            f"target={self.context.target!r})"
        )
        return f"Choice(request={request}, name={self.name!r}, rejected={self.rejected})"


@attrs.define(eq=False)
class Selection:
    """The choice among kernels for one program.

    Attributes:
        platform: where the program runs.
        target: on which hardware, by its name; empty if unknown.
        gradients: whether it differentiates.
        declared: op class -> its kernels.
        choices: the choices in the order of the trace, each different call once.
        required: the names of the ops that have to run by the kernel that the config names; None means every op.
    """

    platform: str = attrs.field(factory=jax.default_backend)
    target: str = ""
    gradients: bool = True
    declared: Callable[[OpClass], Sequence[KernelImplementation]] = installed
    choices: list[Choice] = attrs.field(factory=list)
    required: Container[str] | None = None

    def choose(self, op: Call[R], name: str | None = None) -> Kernel[Call[R], R]:
        """The kernel for a call: the one called `name`, or the one of highest priority that supports it.

        Raises:
            RequestError: `name` does not exist, or does not support a call that requires it, or no kernel supports the call.
        """
        call = op.abstract()
        context = KernelContext(platform=self.platform, target=self.target, gradients=self.gradients)
        ranked = sorted(self.declared(type(op)), key=lambda k: (-k.priority, k.name))
        candidates, rejected = ranked, dict[str, str]()
        if name is not None:
            if self.required is None or op.name in self.required:
                candidates = [_find(type(op), name, ranked)]
            elif any(k.name == name for k in ranked) or not _names_kernel(name):
                candidates = [_find(type(op), name, ranked), *(k for k in ranked if k.name != name)]
            else:
                rejected[name] = f"not a kernel of {op.name}"
        for implementation in candidates:
            kernel, reason = _consider(implementation, call, context)
            if reason is None:
                choice = Choice(
                    op=call,
                    context=context,
                    name=implementation.name,
                    rejected=rejected,
                    named=name,
                    compiler_options=implementation.compiler_options.get(self.platform, {}),
                )
                if choice not in self.choices:
                    self.choices.append(choice)
                return kernel
            rejected[implementation.name] = reason
        reasons = "".join(f"\n    {k}: {why}" for k, why in rejected.items()) or " none is installed"
        problem = f"the {op.name} kernel {name!r} cannot do this" if name else f"no {op.name} kernel can do this"
        remedy = f"leave `kernel` unset, or name another: {_names(ranked)}"
        fix = remedy if name else "install a plugin that has one"
        raise RequestError(f"{problem}\n    got: {call} on {self.platform}{reasons}\n    fix: {fix}")


def _find(op: OpClass, name: str, ranked: Sequence[KernelImplementation]) -> KernelImplementation:
    for implementation in ranked:
        if implementation.name == name:
            return implementation
    close = nearest(name, [k.name for k in ranked])
    raise RequestError(
        f"unknown {op.name} kernel {name!r}\n"
        + (f"    did you mean: {', '.join(close)}?\n" if close else "")
        + f"    known: {_names(ranked)}\n    fix: leave `kernel` unset to have the best one chosen"
    )


def _names_kernel(name: str) -> bool:
    """Whether an installed plugin declares a kernel of this name, for any op."""
    from axlearn_core.plugins.manager import host  # as above

    return any(kernel.name == name for _, declared in host().answers("axlearn_kernels") for kernel in declared)


def _names(implementations: Sequence[KernelImplementation]) -> str:
    return ", ".join(sorted(k.name for k in implementations)) or "none"


def _consider(implementation: KernelImplementation, op: Call[Any], context: KernelContext) -> tuple[Any, str | None]:
    if implementation.platforms and context.platform not in implementation.platforms:
        return None, f"runs on {', '.join(implementation.platforms)}, not on {context.platform}"
    kernel = _import(implementation, op.name)
    return kernel, kernel.supports(op, context)


def _import(implementation: KernelImplementation, op: str) -> Any:
    try:
        return load(implementation.load)
    except (ImportError, AttributeError) as error:
        raise PluginError(f"the {op} kernel {implementation.name!r} cannot be loaded: {error}") from error


_in_force: contextvars.ContextVar[Selection | None] = contextvars.ContextVar("axlearn_kernels", default=None)


@contextlib.contextmanager
def use(selection: Selection) -> Iterator[Selection]:
    """Puts a selection in force, for the time of a trace."""
    token = _in_force.set(selection)
    try:
        yield selection
    finally:
        _in_force.reset(token)


def in_force() -> Selection | None:
    """The selection of the program that is being traced: for kernels that depend on the target."""
    return _in_force.get()


def choose(op: Call[R], name: str | None = None) -> Kernel[Call[R], R]:
    """The kernel for a call under the selection in force; without one the reference, or the kernel called `name`."""
    selection = _in_force.get()
    if selection is None:
        selection, name = Selection(gradients=False), name or REFERENCE
    return selection.choose(op, name)
