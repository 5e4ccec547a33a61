"""Symbolic biases on attention scores: as with masks, no array exists until a kernel asks for one.

Queries and keys are counted by slot, as in `masks`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from axlearn_plugins_transformer.kernels.masks import Range, slots_of


class Bias:
    """The base of all biases: what is added to the scores, after their scale and cap, before the mask."""

    def materialize(
        self, queries: Range, keys: Range, query_slots: jax.Array | None = None, key_slots: jax.Array | None = None
    ) -> jax.Array:
        """float32 [B or 1, N, queries, keys], N the query heads; the arguments are those of `Mask.materialize`."""
        raise NotImplementedError

    def describe(self) -> str:
        """The structure in words, for a kernel that accepts some structures only."""
        return type(self).__name__.lower()


@dataclass(frozen=True)
class LinearBias(Bias):
    """`-slope * |query - key|`, with a slope per query head (Press et al., 2022, "ALiBi")."""

    slopes: tuple[float, ...]

    def materialize(self, queries, keys, query_slots=None, key_slots=None) -> jax.Array:
        """By distance in slots, which within a document is the distance in positions."""
        distance = jnp.abs(slots_of(queries, query_slots, 1) - slots_of(keys, key_slots, 2))
        slopes = jnp.asarray(self.slopes, jnp.float32)[None, :, None, None]
        return -slopes * distance[:, None].astype(jnp.float32)
