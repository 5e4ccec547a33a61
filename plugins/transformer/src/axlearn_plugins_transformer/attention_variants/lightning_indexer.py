"""Indexers, which choose the keys that each query of an attention layer sees (DeepSeek-AI, 2025, "DeepSeek-V3.2").

Legend: B batch, S positions, T cached positions, D width, Q size of the query latents, N heads, H size of a head.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from axlearn_core.config import REQUIRED, Node, interface, node, setting
from axlearn_core.nn.layer import Context, Layer, Precision
from axlearn_core.nn.linear import Linear, Projection
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_transformer.attention import PositionEncoding
from axlearn_plugins_transformer.attention_variants.latent_cache import LatentCache, ReadLatents
from axlearn_plugins_transformer.kernels.masks import Mask, SelectedKeys
from axlearn_plugins_transformer.norm import LayerNorm, Norm

SHARED = "selected_keys"
"""Name under which an indexer shares its selection with later layers."""


class Indexer(Protocol):
    """Chooses the keys of each query.

    It is built with `input_dim`, `query_dim`, `rngs` and `precision`.
    """

    def cache_spec(self, layout: LatentCache, window: int | None) -> Any:
        """Return the entries of its cache, in the layout of the layer's cache, or None if it has none."""
        ...

    def __call__(
        self, x: jax.Array, query: jax.Array, context: Context, mask: Mask, layout: LatentCache, cache: Any = None
    ) -> tuple[SelectedKeys, Any]:
        """Return the selected keys of the tokens, and the new cache.

        Args:
            x: Input of the attention layer, [B, S, D].
            query: Latents of the queries, [B, S, Q].
            context: Context of the attention layer.
            mask: Mask of the attention layer. The indexer selects only visible keys.
            layout: Layout of the cache.
            cache: Arrays of `cache_spec`, or None without a cache.
        """
        ...


class LightningIndexer(Layer):
    """The lightning indexer of DeepSeek-V3.2, which selects the `top_k` keys with the largest scores.

    The score of a query and a key is `sum over heads of weight * relu(query * key)`. All heads share one short key per token, which
    the cache stores. The selection passes no gradients. Freeze the indexer for training, because weight decay would shrink it.
    """

    @node
    class Config(Layer.Config["LightningIndexer"]):
        """Settings for the heads and the selection.

        Attributes:
            num_heads: Number of heads.
            head_dim: Size of a head.
            top_k: Number of keys per query.
            position: Position encoding of queries and keys, or None.
            norm: Norm of the keys, or None.
            query: Query projection, from the latents of the queries.
            key: Key projection.
            weight: Projection to the weight of each head.
        """

        input_dim: int = interface(default=REQUIRED)
        query_dim: int = interface(default=REQUIRED)
        num_heads: int = setting(default=64, ge=1)
        head_dim: int = setting(default=128, ge=1)
        top_k: int = setting(default=2048, ge=1)
        position: Node[PositionEncoding] | None = None
        norm: Node[Norm] | None = LayerNorm.Config(eps=1e-6)
        query: Node[Projection] = Linear.Config()
        key: Node[Projection] = Linear.Config()
        weight: Node[Projection] = Linear.Config()

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        width, latent, heads, size = (cfg.input_dim,), (cfg.query_dim,), cfg.num_heads, cfg.head_dim

        def project(cfg_map: Node[Projection], source: tuple[int, ...], out: tuple[int, ...], *axes: str) -> Any:
            return self.child(cfg_map, rngs=rngs, input_dims=source, output_dims=out, axes=axes)

        self.query = project(cfg.query, latent, (heads, size), "embed", "heads", "head_dim")
        self.key = project(cfg.key, width, (size,), "embed", "head_dim")
        self.weight = project(cfg.weight, width, (heads,), "embed", "heads")
        if cfg.norm is not None:
            self.norm = self.child(cfg.norm, rngs=rngs, dim=size)
        if cfg.position is not None:
            self.position = self.child(cfg.position, rngs=rngs, head_dim=size, num_heads=heads)

    def cache_spec(self, layout: LatentCache, window: int | None) -> Any:
        """Return the entry of the keys; see `Indexer`."""
        return layout.spec(self.cfg.head_dim, self.precision.compute, window)

    def __call__(
        self, x: jax.Array, query: jax.Array, context: Context, mask: Mask, layout: LatentCache, cache: Any = None
    ) -> tuple[SelectedKeys, Any]:
        """Select keys, and share the selection with later layers; see `Indexer`."""
        x, query = lax.stop_gradient((x, query))
        q = constrain(self.query(query), "batch", "sequence", "activation_heads", None)
        k = self.key(x)
        k = (k if self.cfg.norm is None else self.norm(k))[:, :, None]
        if self.cfg.position is not None:
            positions = context.positions
            positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None] if positions is None else positions
            q, k = self.position(q, k, positions)
        weight, k = self.weight(x).astype(jnp.float32), k[:, :, 0]
        if cache is None:
            slots = self._select(q, weight, k, mask.materialize((0, x.shape[1]), (0, x.shape[1])))
        else:
            cache, keys = layout.write(cache, k, context.slots)
            slots = self._select_cached(q, weight, keys, context, mask)
        selection = SelectedKeys(lax.stop_gradient(slots))
        context.share(SHARED, selection.slots)
        return selection, cache

    def _select_cached(
        self, q: jax.Array, weight: jax.Array, keys: ReadLatents, context: Context, mask: Mask
    ) -> jax.Array:
        """Select among cached keys, for some rows at a time if each row has keys of its own: -> int32 [B, S, k]."""
        queries = context.positions if not isinstance(context.slots, jax.Array) else context.slots
        rows, count = q.shape[:2]
        positions = jnp.broadcast_to(jnp.asarray(queries), (rows, count))

        def select(row: jax.Array, q: jax.Array, weight: jax.Array, positions: jax.Array) -> jax.Array:
            key, slots = keys.read(row)
            visible = mask.materialize((0, count), (0, key.shape[1]), positions, slots)
            return self._select(q, weight, key, visible)

        if keys.batch is None:
            return select(jnp.arange(rows), q, weight, positions)

        def select_row(row: tuple[jax.Array, ...]) -> jax.Array:
            return select(*(array[None] for array in row))[0]

        return lax.map(select_row, (jnp.arange(rows), q, weight, positions), batch_size=keys.batch)

    def _select(self, q: jax.Array, weight: jax.Array, key: jax.Array, visible: jax.Array) -> jax.Array:
        """Return the slots of the best visible keys, int32 [B, S, k], or -1 if fewer are visible.

        Adds the scores head by head, so that no array has both heads and keys.
        """
        key = key.astype(jnp.float32)

        def add(total: jax.Array, head: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            query, weight = head
            score = jnp.einsum("bsh,bth->bst", query.astype(jnp.float32), key, precision=lax.Precision.HIGHEST)
            return total + weight[..., None] * jax.nn.relu(score), None

        zeros = jnp.zeros((*q.shape[:2], key.shape[1]), jnp.float32)
        heads = jnp.moveaxis(q, 2, 0), jnp.moveaxis(weight, 2, 0)
        total = jnp.where(visible, lax.scan(add, zeros, heads)[0], -jnp.inf)
        best, slots = lax.top_k(total, min(self.cfg.top_k, key.shape[1]))
        return jnp.where(best > -jnp.inf, slots, -1).astype(jnp.int32)


class SharedSelection(Layer):
    """An indexer that uses the selection of the nearest earlier layer with an indexer of its own (GLM-5)."""

    @node
    class Config(Layer.Config["SharedSelection"]):
        """A config without settings."""

    def __init__(self, cfg: Config, *, precision: Precision):
        super().__init__(cfg, precision=precision)

    def cache_spec(self, layout: LatentCache, window: int | None) -> None:
        """Return None, because it stores nothing."""

    def __call__(
        self, x: jax.Array, query: jax.Array, context: Context, mask: Mask, layout: LatentCache, cache: Any = None
    ) -> tuple[SelectedKeys, Any]:
        """Return the shared selection; see `Indexer`."""
        return SelectedKeys(context.read_shared(SHARED)), cache
