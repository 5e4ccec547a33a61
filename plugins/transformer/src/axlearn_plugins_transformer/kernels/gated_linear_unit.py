"""The `gated_linear_unit` op: `activation(gate(x)) * up(x)` (Shazeer, 2020).

`gate` and `up` are projections.

B batch, S positions, D width, F hidden size.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

import attrs
import jax

from axlearn_core.kernels.op import Op, Shape
from axlearn_core.nn.linear import Linear, Projection
from axlearn_core.nn.remat import tag

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jax.nn.relu(x) ** 2,  # So et al., 2021
}


@attrs.frozen(eq=False)
class GatedLinearUnitOp(Op[jax.Array]):
    """`activation(gate(x)) * up(x)`.

    A kernel computes both matmuls at once, so it needs their matrices. A projection is `plain` if it only multiplies by a
    matrix, without adapters, quantization or bias. The result is [B, S, F] in the dtype of the projections.

    Attributes:
        x: [B, S, D].
        gate: Projection [D] -> [F]. In an abstract op, the shape and dtype of its matrix [D, F], or None if not plain.
        up: Projection [D] -> [F]; see `gate`.
        hidden_dim: F.
        activation: A key of `ACTIVATIONS`.
    """

    name = "gated_linear_unit"

    x: jax.Array
    gate: Projection | jax.ShapeDtypeStruct | None
    up: Projection | jax.ShapeDtypeStruct | None
    hidden_dim: int = attrs.field(kw_only=True)
    activation: Activation = attrs.field(kw_only=True)

    @property
    def plain(self) -> bool:
        """True if both projections only multiply by a matrix."""
        return _matrix(self.gate) is not None and _matrix(self.up) is not None

    def operands(self) -> Mapping[str, Any]:
        """Return the input, and the matrices of plain projections."""
        return {"x": self.x, "gate": _matrix(self.gate), "up": _matrix(self.up)} if self.plain else {"x": self.x}

    def options(self) -> Mapping[str, Any]:
        """Return the activation and whether the projections are plain."""
        return {"activation": self.activation, "plain": self.plain}

    def abstract(self) -> Self:
        """Replace the projections with their matrices."""
        x = jax.ShapeDtypeStruct(self.x.shape, self.x.dtype)
        return attrs.evolve(self, x=x, gate=_matrix(self.gate), up=_matrix(self.up))

    def matrices(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return x and the matrices [D, F] of plain projections.

        They are in the compute dtype of the projections.
        """
        gate: Any = self.gate
        up: Any = self.up
        return self.x.astype(gate.precision.compute), gate.computed(gate.weight), up.computed(up.weight)

    def flops(self) -> float:
        """Count two matmuls. Adapters count their own."""
        return 4.0 * math.prod(self.x.shape) * self.hidden_dim

    def bytes(self) -> float:
        """Count the input, two matrices and the result.

        Without matrices, assume the dtype of the input.
        """
        matrix = _matrix(self.gate)
        size = (self.x if matrix is None else matrix).dtype.itemsize
        *rows, width = self.x.shape
        elements = (2 * width + math.prod(rows)) * self.hidden_dim
        return math.prod(self.x.shape) * self.x.dtype.itemsize + elements * size

    def kernel_flops(self, operands: Sequence[Shape], results: Sequence[Shape], *, opaque: bool) -> float | None:
        """Count the matmuls of a launch from its arrays, [M, D] x [D, 2, F]."""
        return 2.0 * operands[0][0] * math.prod(operands[1]) if opaque else None

    def result(self) -> Any:
        """Return the abstract result, [B, S, F]."""
        dtype = (_matrix(self.gate) or self.x).dtype
        return jax.ShapeDtypeStruct((*self.x.shape[:-1], self.hidden_dim), dtype)

    def reference(self) -> jax.Array:
        """Compute two matmuls and tag their results for remat policies."""
        gate: Any = self.gate
        up: Any = self.up
        gates, ups = tag(gate(self.x), "mlp_gate"), tag(up(self.x), "mlp_up")
        return ACTIVATIONS[self.activation](gates) * ups


def _matrix(projection: Any) -> jax.ShapeDtypeStruct | None:
    """Return the abstract matrix of a plain projection, or None.

    Subclasses of `Linear`, such as adapters, are not plain.
    """
    if isinstance(projection, jax.ShapeDtypeStruct):
        return projection
    plain = type(projection) is Linear and not projection.cfg.bias and projection.weight.ndim == 2
    return jax.ShapeDtypeStruct(projection.weight.shape, projection.precision.compute) if plain else None
