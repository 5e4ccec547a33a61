"""The op `gated_linear_unit`: `activation(gate(x)) * up(x)` (Shazeer, 2020), where gate and up are projections.

B batch, S positions, D width, F hidden size.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax

from axlearn_core.contracts.kernels import OpRequest
from axlearn_core.kernels import selection
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


def gated_linear_unit(
    x: jax.Array, gate: Projection, up: Projection, *, activation: Activation, kernel: str | None = None
) -> jax.Array:
    """`activation(gate(x)) * up(x)`.

    A kernel computes both products at once, for which it needs their matrices. Where a projection is more than a product
    with one (adapters, quantization, a bias), the option `plain` is False and `gate` and `up` have no shape in the request.

    Args:
        x: [B, S, D].
        gate: [D] -> [F].
        up: [D] -> [F].
        activation: one of `ACTIVATIONS`.
        kernel: the name of an implementation; None leaves the choice to the selection in force.

    Returns:
        [B, S, F] in the dtype of the projections.

    Raises:
        RequestError: the implementation does not exist or cannot do it.
    """
    plain = _is_plain(gate) and _is_plain(up)
    operands = {"x": x, "gate": _matrix(gate), "up": _matrix(up)} if plain else {"x": x}
    options = {"activation": activation, "plain": plain}
    return selection.chosen("gated_linear_unit", operands, options, kernel)(x, gate, up, activation=activation)


def matrices(x: jax.Array, gate: Any, up: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x and the matrices of plain projections, [D, F] each, in the dtype that the projections compute in."""
    return x.astype(gate.precision.compute), gate.computed(gate.weight), up.computed(up.weight)


def _is_plain(projection: Any) -> bool:
    """Whether it is a product with a matrix and nothing else: a subclass (adapters are one) may compute something else."""
    return type(projection) is Linear and not hasattr(projection, "bias") and projection.weight.ndim == 2


def _matrix(projection: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(projection.weight.shape, projection.precision.compute)


class _XLA:
    """Two products, whose results remat policies know by their tags."""

    def supports(self, request: OpRequest) -> str | None:
        """Everything."""
        return None

    def __call__(self, x: jax.Array, gate: Projection, up: Projection, *, activation: Activation) -> jax.Array:
        """See `gated_linear_unit`."""
        gates, ups = tag(gate(x), "mlp_gate"), tag(up(x), "mlp_up")
        return ACTIVATIONS[activation](gates) * ups


XLA = _XLA()
