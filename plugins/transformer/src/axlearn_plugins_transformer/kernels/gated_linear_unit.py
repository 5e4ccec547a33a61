"""The `gated_linear_unit` op: `activation(gate(x)) * up(x)` (Shazeer, 2020), and other forms of a gate.

`gate` and `up` are projections. An activation is a name, or a node that builds a function. So is the form of the gate.

B batch, S positions, D width, F hidden size.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, Self

import attrs
import jax
import jax.numpy as jnp

from axlearn_core.config import Node, node, setting
from axlearn_core.errors import RequestError
from axlearn_core.kernels.op import Op, Shape
from axlearn_core.nn.layer import Layer
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


class ActivationFunction(Protocol):
    """An elementwise function. Its node builds it without arguments."""

    def __call__(self, x: jax.Array, /) -> jax.Array:
        """Apply the function. The shape and the dtype do not change."""
        ...


class GatedForm(Protocol):
    """Combines the results of the gate projection and the up projection. Its node builds it without arguments."""

    def __call__(self, gate: jax.Array, up: jax.Array, activation: ActivationFunction, /) -> jax.Array:
        """Combine gate [..., F] and up [..., F] into [..., F]. The dtype does not change."""
        ...


@node
class Swish(Node[ActivationFunction]):
    """`x * sigmoid(beta * x)` (Ramachandran et al., 2017). 1.0 is SiLU, and 1.702 approximates GELU.

    Attributes:
        beta: Slope of the sigmoid.
    """

    beta: float = setting(default=1.0, gt=0)

    def build(self, **_: Any) -> ActivationFunction:
        """Return the function."""
        return lambda x: x * jax.nn.sigmoid(self.beta * x)


@node
class ClampedForm(Node[GatedForm]):
    """`activation(min(gate, limit)) * (clip(up, -limit, limit) + up_offset)`, which bounds the hidden activations.

    With the activation `{type: swish, beta: 1.702}` and the default settings, this is the unit of gpt-oss.

    Attributes:
        limit: Bound on the gate from above, and on the up projection from both sides.
        up_offset: Term added to the up projection.
    """

    limit: float = setting(default=7.0, gt=0)
    up_offset: float = 1.0

    def build(self, **_: Any) -> GatedForm:
        """Return the function."""

        def combine(gate: jax.Array, up: jax.Array, activation: ActivationFunction, /) -> jax.Array:
            up = jnp.clip(up, -self.limit, self.limit)
            return activation(jnp.minimum(gate, self.limit)) * (up + self.up_offset if self.up_offset else up)

        return combine


@node
class SparseForm(Node[GatedForm]):
    """`activation(max(gate - cutoff, 0)) * up`, with a cutoff that zeroes about a share `sparsity` of the gate (Gemma 3n).

    The cutoff is the quantile of a normal distribution with the mean and the standard deviation of each position's gate, so this
    form needs all F numbers of a position at once.

    Attributes:
        sparsity: Share of the numbers below the cutoff, if they are normally distributed.
    """

    sparsity: float = setting(default=0.95, gt=0, lt=1)

    def build(self, **_: Any) -> GatedForm:
        """Return the function."""
        deviations = statistics.NormalDist().inv_cdf(self.sparsity)

        def combine(gate: jax.Array, up: jax.Array, activation: ActivationFunction, /) -> jax.Array:
            wide = gate.astype(jnp.promote_types(gate.dtype, jnp.float32))
            cutoff = wide.mean(-1, keepdims=True) + deviations * wide.std(-1, keepdims=True)
            return activation(jax.nn.relu(wide - cutoff).astype(gate.dtype)) * up

        return combine


def activation_function(activation: Activation | Node[ActivationFunction]) -> ActivationFunction:
    """Return the function of an activation.

    Raises:
        RequestError: A node builds something that is not a function.
    """
    return (
        build_function(activation, "an activation", "swish")
        if isinstance(activation, Node)
        else ACTIVATIONS[activation]
    )


def gated_form(form: Node[GatedForm] | None) -> GatedForm:
    """Return the function of a form. None is `activation(gate) * up`.

    Raises:
        RequestError: The node builds something that is not a function.
    """
    if form is None:
        return lambda gate, up, activation, /: activation(gate) * up
    return build_function(form, "a gated form", "clamped-form")


def build_function(cfg: Node[Any], role: str, example: str) -> Any:
    """Build the function of a component.

    Args:
        cfg: The component.
        role: Role of the function with its article, for the error.
        example: Component with this role, for the error.

    Raises:
        RequestError: The component builds something that is not a function.
    """
    if isinstance(cfg, Layer.Config):
        raise RequestError(
            f"{type(cfg).__qualname__} cannot be used as {role} here, because it has parameters\n"
            f"    fix: use it in a `feed-forward` layer, or use a component such as `{example}`"
        )
    function = cfg.build()
    if not callable(function):
        raise RequestError(
            f"{type(cfg).__qualname__} cannot be used as {role}: it does not build a function of arrays\n"
            f"    got: {function!r}\n    fix: use a component such as `{example}`"
        )
    return function


@attrs.frozen(eq=False)
class GatedLinearUnitOp(Op[jax.Array]):
    """`form(gate(x), up(x), activation)`, by default `activation(gate(x)) * up(x)`.

    A kernel computes both matmuls at once, so it needs their matrices. A projection is `plain` if it only multiplies by a
    matrix, without adapters, quantization or bias. The result is [B, S, F] in the dtype of the projections.

    Attributes:
        x: [B, S, D].
        gate: Projection [D] -> [F]. In an abstract op, the shape and dtype of its matrix [D, F], or None if not plain.
        up: Projection [D] -> [F]; see `gate`.
        hidden_dim: F.
        activation: A key of `ACTIVATIONS`, or a node. Only kernels that declare `custom_activation` are used with a node.
        form: How to combine the two results, or None. Only kernels that declare `gated_form` are used with a form.
    """

    name = "gated_linear_unit"

    x: jax.Array
    gate: Projection | jax.ShapeDtypeStruct | None
    up: Projection | jax.ShapeDtypeStruct | None
    hidden_dim: int = attrs.field(kw_only=True)
    activation: Activation | Node[ActivationFunction] = attrs.field(kw_only=True)
    form: Node[GatedForm] | None = attrs.field(default=None, kw_only=True)

    @property
    def plain(self) -> bool:
        """True if both projections only multiply by a matrix."""
        return _matrix(self.gate) is not None and _matrix(self.up) is not None

    def operands(self) -> Mapping[str, Any]:
        """Return the input, and the matrices of plain projections."""
        return {"x": self.x, "gate": _matrix(self.gate), "up": _matrix(self.up)} if self.plain else {"x": self.x}

    def options(self) -> Mapping[str, Any]:
        """Return the activation, whether the projections are plain, and the form if there is one."""
        options = {"activation": self.activation, "plain": self.plain}
        return options if self.form is None else {**options, "form": self.form}

    def extras(self) -> tuple[str, ...]:
        """Return `custom_activation` if a node builds the activation, and `gated_form` if there is a form."""
        extras = {"custom_activation": isinstance(self.activation, Node), "gated_form": self.form is not None}
        return tuple(name for name, used in extras.items() if used)

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
        return gated_form(self.form)(gates, ups, activation_function(self.activation))


def _matrix(projection: Any) -> jax.ShapeDtypeStruct | None:
    """Return the abstract matrix of a plain projection, or None.

    Subclasses of `Linear`, such as adapters, are not plain.
    """
    if isinstance(projection, jax.ShapeDtypeStruct):
        return projection
    plain = type(projection) is Linear and not projection.cfg.bias and projection.weight.ndim == 2
    return jax.ShapeDtypeStruct(projection.weight.shape, projection.precision.compute) if plain else None
