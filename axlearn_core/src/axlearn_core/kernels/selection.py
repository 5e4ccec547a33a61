"""Select a kernel for each op call.

A program activates its selection while it is traced and records the choice at each call site. Outside a program, ops use
their reference. If the config of a layer names a kernel, the layer uses that kernel or raises an error. Other functions
that share the config, such as generation, use the named kernel only if it supports the call.
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
    """Kernel that computes the reference for any op."""

    def supports(self, op: Call[Any], context: KernelContext) -> str | None:
        """Support every call."""
        return None

    def __call__(self, op: Call[R]) -> R:
        """Compute the reference."""
        return op.reference()


REFERENCE_KERNEL = _Reference()


def reference(op: OpClass) -> KernelImplementation:
    """Return the `xla` implementation, which computes the reference and has priority 0."""
    return KernelImplementation(name=REFERENCE, op=op.path(), load=f"{__name__}:REFERENCE_KERNEL")


def installed(op: OpClass) -> Sequence[KernelImplementation]:
    """Return the reference of an op and the kernels that installed plugins provide.

    Raises:
        PluginError: If two kernels have the same name.
    """
    from axlearn_core.plugins.manager import host  # load plugins only when a program needs them

    path = op.path()
    claims = {REFERENCE: ("the op", reference(op))}
    for origin, declared in host().call("axlearn_kernels"):
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
    """Import kernels by op path and name. Their modules may register functions that compiled programs call.

    Raises:
        RequestError: If no installed plugin provides a kernel.
        PluginError: If a kernel cannot be imported.
    """
    from axlearn_core.plugins.manager import host  # as above

    declared = {(k.op, k.name): k for _, answer in host().call("axlearn_kernels") for k in answer}
    for op, name in kernels:
        if name == REFERENCE:
            continue
        if (op, name) not in declared:
            raise RequestError(
                f"a compiled program uses the kernel {name!r} of {op}, which no installed plugin provides\n"
                "    fix: install the plugin that provides it, or compile again without it"
            )
        _import(declared[op, name], op)


def kernel_tags() -> set[str]:
    """Return the activation tags of all installed kernels."""
    from axlearn_core.plugins.manager import host  # as above

    return {tag for _, declared in host().call("axlearn_kernels") for kernel in declared for tag in kernel.tags}


@attrs.frozen(kw_only=True)
class Choice:
    """The kernel for a call site, and the reasons why other kernels were rejected. Stored in run locks.

    Attributes:
        op: The call, with abstract arrays.
        context: Facts about the surrounding program.
        name: Name of the kernel.
        rejected: Reasons by kernel, for kernels with a higher priority and for the one that the config names.
        named: Kernel that the config names, or None.
        compiler_options: XLA options that the kernel requires for the entire program.
    """

    op: Call[Any]
    context: KernelContext
    name: str
    rejected: Mapping[str, str]
    named: str | None = None
    compiler_options: Mapping[str, Any] = {}

    @property
    def call(self) -> str:
        """Description of the call: `rms_norm(x float32[4, 64, 16], ...) on cpu`."""
        return f"{self.op} on {self.context.platform}"

    def __str__(self) -> str:  # run locks store this form and compare it across versions
        shapes = {name: tuple(x.shape) for name, x in self.op.operands().items()}
        request = (
            f"OpRequest(op={self.op.name!r}, platform={self.context.platform!r}, shapes={shapes}, "
            f"dtypes={self.op.dtypes}, options={dict(self.op.options())}, gradients={self.context.gradients}, "
            f"target={self.context.target!r})"
        )
        return f"Choice(request={request}, name={self.name!r}, rejected={self.rejected})"


class KernelError(RequestError):
    """Raised if no kernel can compute a call, or not the one that a config names.

    Attributes:
        kernel: Name of the kernel in the config, or None.
    """

    def __init__(self, message: str, kernel: str | None):
        super().__init__(message)
        self.kernel = kernel

    def with_paths(self, paths: Sequence[str]) -> "KernelError":
        """Return the error with the config paths that name the kernel."""
        message, fix, rest = str(self).rpartition("\n    fix:")
        return KernelError(f"{message}\n    path: {', '.join(paths)}{fix}{rest}", self.kernel)


@attrs.define(eq=False)
class Selection:
    """Kernel selection for one program.

    Attributes:
        platform: Platform that the program runs on.
        target: Name of the hardware, or empty if unknown.
        gradients: True if the program computes gradients.
        declared: Returns the kernels for an op class.
        choices: Choices in trace order, one per distinct call.
        required: Names of the ops that must use the kernel that the config names. None means all ops.
    """

    platform: str = attrs.field(factory=jax.default_backend)
    target: str = ""
    gradients: bool = True
    declared: Callable[[OpClass], Sequence[KernelImplementation]] = installed
    choices: list[Choice] = attrs.field(factory=list)
    required: Container[str] | None = None

    def choose(self, op: Call[R], name: str | None = None) -> Kernel[Call[R], R]:
        """Return the kernel with a given name, or the highest-priority kernel that supports the call.

        Raises:
            KernelError: If the named kernel does not exist or does not support a call that requires it, or if no kernel
                supports the call.
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
            reason = refusal(implementation, call, context)
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
                return _import(implementation, op.name)
            rejected[implementation.name] = reason
        reasons = "".join(f"\n    {k}: {why}" for k, why in rejected.items()) or " no kernel is installed"
        problem = f"the {op.name} kernel {name!r} cannot do this" if name else f"no {op.name} kernel can do this"
        others = [k for k in ranked if k.name not in rejected and refusal(k, call, context) is None]
        remedy = f"leave `kernel` unset, or choose another: {_names(others)}"
        fix = remedy if name else "install a plugin that provides one"
        raise KernelError(f"{problem}\n    got: {call} on {self.platform}{reasons}\n    fix: {fix}", name)


def _find(op: OpClass, name: str, ranked: Sequence[KernelImplementation]) -> KernelImplementation:
    for implementation in ranked:
        if implementation.name == name:
            return implementation
    close = nearest(name, [k.name for k in ranked])
    raise KernelError(
        f"unknown {op.name} kernel {name!r}\n"
        + (f"    did you mean: {', '.join(close)}?\n" if close else "")
        + f"    known: {_names(ranked)}\n    fix: leave `kernel` unset to use the best one",
        name,
    )


def _names_kernel(name: str) -> bool:
    """Return True if an installed plugin provides a kernel with this name for any op."""
    from axlearn_core.plugins.manager import host  # as above

    return any(kernel.name == name for _, declared in host().call("axlearn_kernels") for kernel in declared)


def _names(implementations: Sequence[KernelImplementation]) -> str:
    return ", ".join(sorted(k.name for k in implementations)) or "none"


def refusal(implementation: KernelImplementation, op: Call[Any], context: KernelContext) -> str | None:
    """Return why a kernel does not support a call, or None if it does.

    Raises:
        PluginError: If the kernel cannot be imported.
    """
    if implementation.platforms and context.platform not in implementation.platforms:
        return f"runs on {', '.join(implementation.platforms)}, not on {context.platform}"
    missing = [name for name in op.extras() if name not in implementation.extras]
    if missing and implementation.name != REFERENCE:
        return f"does not support {' and '.join(missing)}"
    return _import(implementation, op.name).supports(op, context)


def _import(implementation: KernelImplementation, op: str) -> Any:
    try:
        return load(implementation.load)
    except (ImportError, AttributeError) as error:
        raise PluginError(f"the {op} kernel {implementation.name!r} cannot be loaded: {error}") from error


_active: contextvars.ContextVar[Selection | None] = contextvars.ContextVar("axlearn_kernels", default=None)


@contextlib.contextmanager
def use(selection: Selection) -> Iterator[Selection]:
    """Activate a selection during a trace."""
    token = _active.set(selection)
    try:
        yield selection
    finally:
        _active.reset(token)


def get_active_selection() -> Selection | None:
    """Return the active selection, or None. Kernels use it to look up the target."""
    return _active.get()


def choose(op: Call[R], name: str | None = None) -> Kernel[Call[R], R]:
    """Return the kernel for a call from the active selection. Without a selection, use `name` or the reference."""
    selection = _active.get()
    if selection is None:
        selection, name = Selection(gradients=False), name or REFERENCE
    return selection.choose(op, name)
