"""The op `rms_norm` (Zhang & Sennrich, 2019)."""

import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.contracts.kernels import OpRequest
from axlearn_core.kernels import selection
from axlearn_core.nn.layer import expand_to


def rms_norm(
    x: jax.Array, weight: jax.Array, *, eps: float, offset: float = 0.0, kernel: str | None = None
) -> jax.Array:
    """`x / sqrt(mean(x^2) + eps) * (weight + offset)` over the last axis, the mean in float32.

    Args:
        x: [..., D].
        weight: [D], in the dtype of the result.
        eps: added to the mean square.
        offset: added to the weight.
        kernel: the name of an implementation; None leaves the choice to the selection in force.

    Returns:
        [..., D] in the dtype of the weight.

    Raises:
        RequestError: the implementation does not exist or cannot do it.
    """
    options = {"eps": eps, "offset": offset}
    return selection.chosen("rms_norm", {"x": x, "weight": weight}, options, kernel)(x, weight, **options)


class _XLA:
    """What XLA fuses with what comes before and after."""

    def supports(self, request: OpRequest) -> str | None:
        """Everything."""
        return None

    def __call__(self, x: jax.Array, weight: jax.Array, *, eps: float, offset: float) -> jax.Array:
        """See `rms_norm`."""
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
        weight = weight + offset if offset else weight
        return y.astype(weight.dtype) * expand_to(weight, x.ndim)


XLA = _XLA()
