"""Which implementation an op uses.

A program sets the selection for its trace and keeps what was chosen at each call site; outside one the XLA reference
runs. A layer whose config names an implementation gets that one, or an error.
"""

import contextlib
import contextvars
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import jax

from axlearn_core.contracts.kernels import Choice, Kernel, KernelImplementation, OpRequest
from axlearn_core.errors import PluginError, RequestError, nearest

REFERENCE = "xla"


def installed(op: str) -> Sequence[KernelImplementation]:
    """What all installed plugins declare for an op; raises `PluginError` where two claim a name."""
    from axlearn_core.plugins.manager import host  # loads plugins: only when a program asks

    found: dict[str, tuple[str, KernelImplementation]] = {}
    for origin, declared in host().answers("axlearn_kernels", op=op):
        for implementation in declared:
            if implementation.name in found:
                other = found[implementation.name][0]
                raise PluginError(f"the {op} kernel {implementation.name!r} is claimed by {other} and by {origin}")
            found[implementation.name] = (origin, implementation)
    return [implementation for _, implementation in found.values()]


@attrs.define(eq=False)
class Selection:
    """The choice among implementations for one program.

    Attributes:
        platform: where the program runs.
        target: on which hardware, by its name; empty where that is not known.
        gradients: whether it differentiates.
        declared: op -> its implementations.
        choices: what was chosen, in the order of the trace, each different call once.
    """

    platform: str = attrs.field(factory=jax.default_backend)
    target: str = ""
    gradients: bool = True
    declared: Callable[[str], Sequence[KernelImplementation]] = installed
    choices: list[Choice] = attrs.field(factory=list)

    def choose(self, request: OpRequest, name: str | None = None) -> Kernel:
        """The kernel for a request: the one called `name`, or the one with the highest priority that supports it.

        Raises:
            RequestError: `name` does not exist or does not support the request, or nothing supports it.
        """
        ranked = sorted(self.declared(request.op), key=lambda k: (-k.priority, k.name))
        if name is not None:
            ranked = [self._named(request, name, ranked)]
        rejected: dict[str, str] = {}
        for implementation in ranked:
            kernel, reason = _considered(implementation, request)
            if reason is None:
                choice = Choice(request=request, name=implementation.name, rejected=rejected)
                if choice not in self.choices:
                    self.choices.append(choice)
                return kernel
            rejected[implementation.name] = reason
        reasons = "".join(f"\n    {k}: {why}" for k, why in rejected.items())
        what = f"the {request.op} kernel {name!r} cannot do this" if name else f"no {request.op} kernel can do this"
        fix = (
            f"leave `kernel` unset, or name another: {self._names(request.op)}"
            if name
            else "install a plugin that has one"
        )
        raise RequestError(f"{what}\n    got: {request}{reasons or ' none is installed'}\n    fix: {fix}")

    def _named(self, request: OpRequest, name: str, ranked: Sequence[KernelImplementation]) -> KernelImplementation:
        for implementation in ranked:
            if implementation.name == name:
                return implementation
        close = nearest(name, [k.name for k in ranked])
        raise RequestError(
            f"unknown {request.op} kernel {name!r}\n"
            + (f"    did you mean: {', '.join(close)}?\n" if close else "")
            + f"    known: {self._names(request.op)}\n    fix: leave `kernel` unset to have the best one chosen"
        )

    def _names(self, op: str) -> str:
        return ", ".join(sorted(k.name for k in self.declared(op))) or "none"


def _considered(implementation: KernelImplementation, request: OpRequest) -> tuple[Any, str | None]:
    if implementation.platforms and request.platform not in implementation.platforms:
        return None, f"runs on {', '.join(implementation.platforms)}, not on {request.platform}"
    module, _, attribute = implementation.load.partition(":")
    try:
        kernel = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"the {implementation.op} kernel {implementation.name!r} cannot be loaded: {error}"
        ) from error
    return kernel, kernel.supports(request)


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


def chosen(op: str, operands: dict[str, Any], options: dict[str, Any], name: str | None = None) -> Kernel:
    """The kernel for one call of an op under the selection in force; the reference (or `name`) where there is none."""
    selection = _in_force.get()
    if selection is None:
        selection, name = Selection(gradients=False), name or REFERENCE
    request = OpRequest(
        op=op,
        platform=selection.platform,
        target=selection.target,
        shapes={k: tuple(v.shape) for k, v in operands.items()},
        dtypes={k: str(v.dtype) for k, v in operands.items()},
        options=options,
        gradients=selection.gradients,
    )
    return selection.choose(request, name)
