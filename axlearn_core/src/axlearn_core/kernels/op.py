"""`Op`: a typed description of an operation call, which layers, kernels, plans, and tests share."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.contracts.arrays import is_array
from axlearn_core.kernels.selection import choose
from axlearn_core.plugins.backends import prepare_backends

R = TypeVar("R")
Shape = tuple[int, ...]


@attrs.frozen(eq=False)
class Op(Generic[R]):
    """Base class for ops. A subclass is an `@attrs.frozen(eq=False)` class whose fields are operands and options.

    Operands are arrays or pytrees of arrays. Options are static. Two ops are equal if they have the same class,
    `options`, and operand shapes and dtypes. Array values do not matter, because kernels cannot depend on them.

    Attributes:
        name: Name of the op in messages, run locks, and plans.
    """

    name: ClassVar[str]

    def operands(self) -> Mapping[str, Any]:
        """Return the arrays whose shapes and dtypes determine the kernel, by name."""
        raise NotImplementedError

    def options(self) -> Mapping[str, Any]:
        """Return the hashable options that determine the kernel, by name. Describe pytrees such as masks."""
        return {}

    def extras(self) -> tuple[str, ...]:
        """Return the names of the optional operands and results that this call uses.

        The selection rejects kernels that do not declare them, so a kernel that was written before the op had an optional operand
        never silently ignores the operand. The reference supports all of them.
        """
        return ()

    def reference(self) -> R:
        """Compute the op in plain JAX. Tests compare the values and gradients of every kernel with it."""
        raise NotImplementedError

    def flops(self) -> float:
        """Return the FLOPs of all matrix multiplications in the forward pass. A multiply-add counts as two."""
        raise NotImplementedError

    def bytes(self) -> float:
        """Return the number of bytes moved by reading each operand once and writing each result once."""
        return sum(map(_nbytes, self._arrays())) + sum(map(_nbytes, jax.tree.leaves(self.result())))

    def visible(self) -> float:
        """Return the fraction of `flops` that is necessary, such as the unmasked part of attention."""
        return 1.0

    def kernel_flops(self, operands: Sequence[Shape], results: Sequence[Shape], *, opaque: bool) -> float | None:
        """Return the FLOPs of one kernel launch in the op or its gradient, or None to count the kernel's matmuls.

        Args:
            operands: Shapes of the launch's floating-point operands on one device.
            results: Shapes of its results on one device.
            opaque: True if the kernel multiplies with instructions that JAX cannot inspect (Mosaic GPU).
        """
        return None

    def result(self) -> Any:
        """Return the shapes and dtypes of the results."""
        leaves, tree = jax.tree.flatten(self._fields())
        places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

        def compute(arrays: list[Any]) -> R:
            values = dict(zip(places, arrays, strict=True))
            fields = tree.unflatten([values.get(i, leaf) for i, leaf in enumerate(leaves)])
            return attrs.evolve(self, **fields).reference()

        return jax.eval_shape(compute, [_spec(leaves[i]) for i in places])

    def abstract(self) -> Self:
        """Replace each array with a `jax.ShapeDtypeStruct`."""
        return attrs.evolve(self, **jax.tree.map(_spec, self._fields()))

    def resize(self, sizes: Mapping[int, int]) -> Self:
        """Replace each array with an abstract array of a different size.

        Override this method if an option has to shrink together with the arrays.

        Args:
            sizes: New sizes by old size. All other sizes stay the same.
        """

        def resize(x: Any) -> Any:
            return jax.ShapeDtypeStruct(tuple(sizes.get(n, n) for n in x.shape), x.dtype) if is_array(x) else x

        return attrs.evolve(self, **jax.tree.map(resize, self._fields()))

    def sample(self, rng: np.random.Generator) -> Self:
        """Replace each float array with normally distributed values, and every other array with zeros.

        Override this method if the op needs other values, such as indices within bounds.
        """
        return attrs.evolve(self, **jax.tree.map(lambda x: _sample(x, rng) if is_array(x) else x, self._fields()))

    def run(self, kernel: str | None = None) -> R:
        """Compute the op with a kernel from the active selection, or with the reference if no selection is active.

        Args:
            kernel: Name of a kernel. If None, use the best one.

        Raises:
            RequestError: If the kernel does not exist or does not support this call.
        """
        prepare_backends()
        return choose(self, kernel)(self)

    @property
    def dtypes(self) -> dict[str, str]:
        """Dtypes of the `operands` by name."""
        return {name: str(x.dtype) for name, x in self.operands().items()}

    @classmethod
    def path(cls) -> str:
        """Return `"module:Class"`, the identifier that kernels use for their op."""
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


def _sample(x: Any, rng: np.random.Generator) -> jax.Array:
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.asarray(rng.normal(size=x.shape) if floating else np.zeros(x.shape), x.dtype)


def _spec(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x


def _nbytes(x: Any) -> int:
    return math.prod(x.shape) * x.dtype.itemsize
