"""Symbolic biases on attention scores.

A kernel can materialize a bias, as it can a mask.

Queries and keys are indexed by slot, as in `masks`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from axlearn_plugins_transformer.kernels.masks import Range, expand_slots


class Bias:
    """Base class for biases.

    A bias is added to the scores after scale and cap, before the mask.
    """

    def materialize(
        self, queries: Range, keys: Range, query_slots: jax.Array | None = None, key_slots: jax.Array | None = None
    ) -> jax.Array:
        """Return the bias, float32 [B or 1, N, queries, keys], for N query heads.

        See `Mask.materialize` for arguments.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """Describe the structure, for kernels that support only some structures."""
        return type(self).__name__.lower()


@dataclass(frozen=True)
class LinearBias(Bias):
    """`-slope * |query - key|`, with one slope per query head (Press et al., 2022, "ALiBi")."""

    slopes: tuple[float, ...]

    def materialize(self, queries, keys, query_slots=None, key_slots=None) -> jax.Array:
        """Compute the bias from slot distances.

        Within a document, these equal position distances.
        """
        distance = jnp.abs(expand_slots(queries, query_slots, 1) - expand_slots(keys, key_slots, 2))
        slopes = jnp.asarray(self.slopes, jnp.float32)[None, :, None, None]
        return -slopes * distance[:, None].astype(jnp.float32)
