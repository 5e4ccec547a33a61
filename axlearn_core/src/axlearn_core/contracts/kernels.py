"""Kernel declarations, and the protocol for kernels. This module does not import JAX."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self, TypeVar, runtime_checkable

import attrs

O_contra = TypeVar("O_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)

_PATH = re.compile(r"[\w.]+:[\w.<>]+")


def _check_path(implementation: object, field: attrs.Attribute[str], value: str) -> None:
    if not _PATH.fullmatch(value):
        raise ValueError(f"`{field.name}` of a kernel must be 'module:name', got {value!r}")


@attrs.frozen(kw_only=True)
class KernelImplementation:
    """An implementation of an op, which plugins declare in `axlearn_kernels`. It is imported when it is first considered.

    Attributes:
        name: Name in configs (`attention.kernel=xla-blocked`), unique within the op.
        op: Class of the op as `"module:Class"`. Use the module that defines the class, not one that re-exports it.
        load: `"module:attribute"` of the `Kernel`.
        priority: The kernel with the highest priority among those that support a call is used. The reference has priority 0.
        platforms: JAX platforms that the kernel supports. Empty means all.
        tags: Activation tags of residuals that only this kernel produces. A config may name them on any machine. They have no
            effect if a different kernel is used.
        compiler_options: XLA options by platform, for every program that contains this kernel. A config that sets one of
            them to a different value is an error.
        interpreter: `"module:function"` that returns a context manager. Within it, the kernel runs on CPUs, although slowly. None
            if the kernel does not need one or has none.
        hardware_only: Why there is no interpreter, as a sentence without its subject: `runs only on NVIDIA GPUs`.
        extras: Optional operands and results of the op that the kernel supports, such as `sinks`; see `Call.extras`.
    """

    name: str
    op: str = attrs.field(validator=_check_path)
    load: str = attrs.field(validator=_check_path)
    priority: int = 0
    platforms: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    compiler_options: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict, hash=False)
    interpreter: str | None = None
    hardware_only: str = ""
    extras: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class KernelContext:
    """Facts about the program that contains an op call.

    Attributes:
        platform: JAX platform of the program (`cpu`, `gpu`, `tpu`, `neuron`).
        target: Hardware (`h100`, `tpu-v5p`), or empty if unknown.
        gradients: True if the program differentiates the call.
    """

    platform: str
    target: str = ""
    gradients: bool = True


class Call(Protocol[R_co]):
    """An op call, described for kernel selection. `axlearn_core.kernels.op.Op` implements it."""

    name: ClassVar[str]

    def operands(self) -> Mapping[str, Any]:
        """Return the arrays that determine the kernel, by name. They may be abstract."""
        ...

    def options(self) -> Mapping[str, Any]:
        """Return the hashable options that determine the kernel, by name."""
        ...

    def extras(self) -> tuple[str, ...]:
        """Return the optional operands and results of this call. Only kernels that declare them are selected."""
        ...

    @property
    def dtypes(self) -> dict[str, str]:
        """Dtypes of the `operands` by name."""
        ...

    def abstract(self) -> Self:
        """Replace arrays with their shapes and dtypes."""
        ...

    def reference(self) -> R_co:
        """Compute the op in plain JAX."""
        ...

    @classmethod
    def path(cls) -> str:
        """Return `"module:Class"`, the identifier that kernels use for their op."""
        ...


@runtime_checkable
class TagsResult(Protocol):
    """A kernel that can tag its result, so that the layer does not need to.

    Attributes:
        tags_result: True if the kernel tags its result.
    """

    tags_result: bool


def tags_result(kernel: object) -> bool:
    """Return True if a kernel tags its result; see `TagsResult`."""
    return isinstance(kernel, TagsResult) and kernel.tags_result


class Kernel(Protocol[O_contra, R_co]):
    """A kernel, named by `KernelImplementation.load`. `O` is the class of the op, and `R` is its result."""

    def supports(self, op: O_contra, context: KernelContext) -> str | None:
        """Return None if the kernel supports the call, or else a reason ("the head size 80 is not a multiple of 128").

        The operands of `op` are abstract.
        """
        ...

    def __call__(self, op: O_contra) -> R_co:
        """Compute the op."""
        ...
