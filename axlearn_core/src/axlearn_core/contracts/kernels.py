"""What a plugin says of a kernel, what an op asks for, and what a kernel answers. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import attrs


@attrs.frozen(kw_only=True)
class KernelImplementation:
    """One implementation of an op, as `axlearn_kernels` declares it; nothing is imported until it is considered.

    Attributes:
        name: what configs call it (`attention.kernel=xla-blocked`), unique within the op.
        op: `attention`, `cross_entropy`, ...
        load: `"module:attribute"` of its `Kernel`.
        priority: among those that support a request the highest wins; the XLA reference has 0.
        platforms: JAX platform names that it runs on; empty means all.
    """

    name: str
    op: str
    load: str
    priority: int = 0
    platforms: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class OpRequest:
    """One call of an op, as far as it is known while tracing.

    Attributes:
        op: the op.
        platform: where the program will run (`cpu`, `gpu`, `tpu`, `neuron`).
        target: on which hardware (`h100`, `tpu-v5p`); empty where that is not known.
        shapes: operand -> shape.
        dtypes: operand -> dtype name.
        options: the op's static options. For attention: `mask` (a description of its structure), `softcap`,
            `aligned` (query i and key i are the same position), `skips` (whether the mask hides whole blocks), and where scores
            take one, `bias` (a description of it). Values may have another head size than keys.
        gradients: whether the program differentiates through the call.
    """

    op: str
    platform: str
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    options: Mapping[str, Any]
    gradients: bool
    target: str = ""

    def __str__(self) -> str:
        operands = (f"{name} {self.dtypes[name]}{list(shape)}" for name, shape in self.shapes.items())
        options = (f"{k}={v}" for k, v in self.options.items())
        return f"{self.op}({', '.join([*operands, *options])}) on {self.platform}"


class Kernel(Protocol):
    """What `KernelImplementation.load` names."""

    def supports(self, request: OpRequest) -> str | None:
        """None where it can do it, or the reason why not ("the head size 80 is no multiple of 128")."""
        ...

    def __call__(self, *operands: Any, **options: Any) -> Any:
        """Does it; the op's own documentation says what goes in and out."""
        ...


@attrs.frozen(kw_only=True)
class Choice:
    """Which implementation a call site got, and why the others were not taken; goes to the run lock."""

    request: OpRequest
    name: str
    rejected: Mapping[str, str]
