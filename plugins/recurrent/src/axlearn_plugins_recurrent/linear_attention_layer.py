"""What layers with the `linear_attention` op share: queries, keys and values, their convolutions, and the state.

Legend: B sequences, S tokens, D width, G heads of queries and keys, H heads of values, K key size, V value size.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from axlearn_core.config import Node
from axlearn_core.nn.layer import Layer
from axlearn_core.nn.linear import Projection
from axlearn_core.nn.remat import tag
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_recurrent.convolution import TokenConvolution
from axlearn_plugins_transformer.cache_spec import CacheEntry
from axlearn_plugins_transformer.recurrence import Reload, Sequences

HEADS = ("batch", "sequence", "activation_heads", None)
GROUPS = ("batch", "sequence", "activation_kv", None)
"""Logical axes of values, and of queries and keys that several heads share."""


class LinearAttentionLayer(Layer):
    """Base class of layers with the `linear_attention` op.

    Attributes:
        keys: (G, K).
        values: (H, V).
        query: Projection to [G, K].
        key: Projection to [G, K].
        value: Projection to [H, V].
        convolutions: Convolutions of the queries, keys and values, by name; empty if there are none.
    """

    keys: tuple[int, int]
    values: tuple[int, int]
    query: Projection
    key: Projection
    value: Projection

    def build_convolutions(
        self,
        cfg: Node[TokenConvolution] | None,
        rngs: nnx.Rngs,
        key_axes: Sequence[str | None],
        value_axes: Sequence[str | None],
    ) -> None:
        """Build the convolutions of queries, keys and values, given the logical axes of keys and values."""
        parts: dict[str, Any] = {}
        if cfg is not None:
            for name in ("query", "key", "value"):
                channels, axes = (self.values, value_axes) if name == "value" else (self.keys, key_axes)
                parts[name] = self.child(cfg, rngs=rngs, channels=channels, axes=axes)
        self.convolutions = nnx.Dict(parts)

    def cache_spec(self) -> dict[str, CacheEntry]:
        """Return the entries of the state: a matrix [K, V] for each head, and the latest inputs of the convolutions."""
        shape, axes = (self.values[0], self.keys[1], self.values[1]), ("activation_heads", None, None)
        state = CacheEntry(per="request", shape=shape, dtype="float32", axes=axes)
        return {"state": state, **{name: part.cache_spec() for name, part in self.convolutions.items()}}

    def project(
        self, x: jax.Array, sequences: Sequences, state: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]:
        """Compute queries [B, S, G, K], keys [B, S, G, K], values [B, S, H, V], and the latest inputs of the convolutions."""
        results, latest = [], {}
        for name, projection in (("query", self.query), ("key", self.key), ("value", self.value)):
            shared = name != "value" and self.keys[0] != self.values[0]
            y = constrain(tag(projection(x), name), *(GROUPS if shared else HEADS))
            if name in self.convolutions:
                part = None if state is None else state[name]
                y, latest[name] = self.convolutions[name](y, part_of(sequences, name), part)
            results.append(y)
        query, key, value = results
        return query, key, value, latest


def part_of(sequences: Sequences, name: str) -> Sequences:
    """Return sequences whose chunks begin with one part of the state."""
    reload = sequences.reload
    if reload is None:
        return sequences
    part = Reload(restarts=reload.restarts, states=reload.states[name], chunk=reload.chunk)
    return dataclasses.replace(sequences, reload=part)
