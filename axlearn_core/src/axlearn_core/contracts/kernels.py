"""How a plugin declares a kernel, and what a kernel has to provide. Imports no JAX."""

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
        raise ValueError(f"a kernel's `{field.name}` is 'module:name', got {value!r}")


@attrs.frozen(kw_only=True)
class KernelImplementation:
    """One implementation of an op, declared through `axlearn_kernels`. Imported when a call first considers it.

    Attributes:
        name: the name that configs use (`attention.kernel=xla-blocked`), unique within the op.
        op: the op's class, as `"module:Class"`: the module that defines the class, not one that re-exports it.
        load: `"module:attribute"` of its `Kernel`.
        priority: the highest among the kernels that support a call wins; the reference has 0.
        platforms: JAX platform names that it runs on; empty means all.
        tags: activation tags of its own, of what its backward pass takes. A config may name them on any machine; where
            another kernel runs, there is nothing to keep.
        compiler_options: platform -> XLA's options for every program that has this kernel, if the kernel promises
            something of the whole program. A config that sets one of them to another value is an error.
    """

    name: str
    op: str = attrs.field(validator=_check_path)
    load: str = attrs.field(validator=_check_path)
    priority: int = 0
    platforms: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    compiler_options: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict, hash=False)


@attrs.frozen(kw_only=True)
class KernelContext:
    """The program around a call of an op.

    Attributes:
        platform: the JAX platform that the program will run on (`cpu`, `gpu`, `tpu`, `neuron`).
        target: the hardware (`h100`, `tpu-v5p`); empty if unknown.
        gradients: whether the program differentiates through the call.
    """

    platform: str
    target: str = ""
    gradients: bool = True


class Call(Protocol[R_co]):
    """What choosing a kernel asks of a call of an op; `axlearn_core.kernels.op.Op` is one."""

    name: ClassVar[str]

    def operands(self) -> Mapping[str, Any]:
        """Name -> array, or its shape and dtype, of what kernels decide by."""
        ...

    def options(self) -> Mapping[str, Any]:
        """Name -> hashable value, of the options that kernels decide by."""
        ...

    @property
    def dtypes(self) -> dict[str, str]:
        """Name -> dtype of each of the `operands`."""
        ...

    def abstract(self) -> Self:
        """The call with shapes and dtypes in place of arrays."""
        ...

    def reference(self) -> R_co:
        """Computes it in plain JAX."""
        ...

    @classmethod
    def path(cls) -> str:
        """`"module:Class"`, by which kernels name their op."""
        ...


@runtime_checkable
class TagsResult(Protocol):
    """A kernel that may give its result the activation tag itself, so that the layer does not give it once more.

    Attributes:
        tags_result: whether it does.
    """

    tags_result: bool


def tags_result(kernel: object) -> bool:
    """Whether a kernel gives its result the activation tag; see `TagsResult`."""
    return isinstance(kernel, TagsResult) and kernel.tags_result


class Kernel(Protocol[O_contra, R_co]):
    """The object that `KernelImplementation.load` names. `O` is the op's class, `R` its result."""

    def supports(self, op: O_contra, context: KernelContext) -> str | None:
        """None if it can compute the op there, else the reason ("the head size 80 is not a multiple of 128").

        The operands of `op` are shapes and dtypes, without values.
        """
        ...

    def __call__(self, op: O_contra) -> R_co:
        """Computes the op."""
        ...
