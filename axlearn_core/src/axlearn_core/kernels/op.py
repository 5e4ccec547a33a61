"""`Op`: one call of an operation as a typed value, which its layer, its kernels, the plan and the tests share."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar

import attrs
import jax

from axlearn_core.contracts.arrays import is_array
from axlearn_core.kernels.selection import choose

R = TypeVar("R")
Shape = tuple[int, ...]


@attrs.frozen(eq=False)
class Op(Generic[R]):
    """The base of all ops. A subclass is an `@attrs.frozen(eq=False)` class whose fields are operands and options.

    Operands are arrays, or pytrees that hold arrays. Options are static. Two ops are equal if they are of one class and
    agree in `operands` (shapes and dtypes) and `options`: everything that a kernel may decide by, and no values.

    Attributes:
        name: the op in messages, run locks and plans.
    """

    name: ClassVar[str]

    def operands(self) -> Mapping[str, Any]:
        """Name -> array, of the operands whose shape and dtype kernels decide by."""
        raise NotImplementedError

    def options(self) -> Mapping[str, Any]:
        """Name -> hashable value, of the options that kernels decide by; pytrees (a mask) by their description."""
        return {}

    def reference(self) -> R:
        """Computes the op in plain JAX. Every kernel is held to its values and gradients."""
        raise NotImplementedError

    def flops(self) -> float:
        """Matrix-product FLOPs of the forward pass by the mathematics, a multiply-add as two, nothing skipped."""
        raise NotImplementedError

    def bytes(self) -> float:
        """Bytes of all operands, each read once, and of the results, each written once."""
        return sum(map(_nbytes, self._arrays())) + sum(map(_nbytes, jax.tree.leaves(self.result())))

    def visible(self) -> float:
        """The share of `flops` that the op's mathematics needs; a kernel may skip the rest. Attention: by its mask."""
        return 1.0

    def kernel_flops(self, operands: Sequence[Shape], results: Sequence[Shape], *, opaque: bool) -> float | None:
        """FLOPs of one kernel launch within the op or its derivative. None if the products in the kernel's body tell.

        Args:
            operands: the shapes of the launch's floating-point operands, which on several devices are one device's.
            results: the shapes of its results.
            opaque: whether the body multiplies by instructions that are not JAX's (Mosaic GPU).
        """
        return None

    def result(self) -> Any:
        """The shapes and dtypes of the results."""
        leaves, tree = jax.tree.flatten(self._fields())
        places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

        def compute(arrays: list[Any]) -> R:
            values = dict(zip(places, arrays, strict=True))
            fields = tree.unflatten([values.get(i, leaf) for i, leaf in enumerate(leaves)])
            return attrs.evolve(self, **fields).reference()

        return jax.eval_shape(compute, [_spec(leaves[i]) for i in places])

    def abstract(self) -> Self:
        """The op with a `jax.ShapeDtypeStruct` in place of each array."""
        return attrs.evolve(self, **jax.tree.map(_spec, self._fields()))

    def run(self, kernel: str | None = None) -> R:
        """Computes the op by a kernel of the selection in force; outside of one, by the reference.

        Args:
            kernel: the name of a kernel; None takes the best one.

        Raises:
            RequestError: the kernel does not exist or does not support this call.
        """
        return choose(self, kernel)(self)

    @property
    def dtypes(self) -> dict[str, str]:
        """Name -> dtype of each of the `operands`."""
        return {name: str(x.dtype) for name, x in self.operands().items()}

    @classmethod
    def path(cls) -> str:
        """`"module:Class"`, by which kernels name their op."""
        return f"{cls.__module__}:{cls.__qualname__}"

    def _fields(self) -> dict[str, Any]:
        return attrs.asdict(self, recurse=False)

    def _arrays(self) -> list[Any]:
        return [leaf for leaf in jax.tree.leaves(self._fields()) if is_array(leaf)]

    def _key(self) -> tuple[Any, ...]:
        shapes = tuple((name, tuple(x.shape)) for name, x in self.operands().items())
        return type(self), shapes, tuple(self.dtypes.values()), tuple(self.options().items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Op) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        operands = (f"{name} {x.dtype}{list(x.shape)}" for name, x in self.operands().items())
        return f"{self.name}({', '.join([*operands, *(f'{k}={v}' for k, v in self.options().items())])})"


def _spec(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x


def _nbytes(x: Any) -> int:
    return math.prod(x.shape) * x.dtype.itemsize
