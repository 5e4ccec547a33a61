"""Indexers against the formula of DeepSeek-V3.2, with every layout of the cache."""

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.errors import RequestError
from axlearn_core.nn.layer import Context, Precision
from axlearn_plugins_rope.rotary import RotaryEmbedding
from axlearn_plugins_transformer.attention_variants.latent import LatentAttention
from axlearn_plugins_transformer.attention_variants.latent_cache import ContiguousLatentCache
from axlearn_plugins_transformer.attention_variants.lightning_indexer import LightningIndexer, SharedSelection
from axlearn_plugins_transformer.attention_variants.paged_latent_cache import PagedLatentCache
from axlearn_plugins_transformer.cache_spec import empty_cache
from axlearn_plugins_transformer.kernels.masks import Causal, Segments
from axlearn_plugins_transformer.kernels.paged_attention import Split
from axlearn_plugins_transformer.paged_cache import PagedSlots

WIDTH, LATENT, LENGTH, TOP = 12, 10, 9, 3
INDEXER = LightningIndexer.Config(
    num_heads=2, head_dim=8, top_k=TOP, position=RotaryEmbedding.Config(fraction=0.5, interleaved=True)
)
ATTENTION = LatentAttention.Config(
    num_heads=2, head_dim=6, rope_head_dim=4, value_head_dim=6, kv_rank=8, query_rank=LATENT, indexer=INDEXER,
    position=RotaryEmbedding.Config(),
)  # fmt: skip


@pytest.fixture
def built(normal):
    """The indexer, its input [2, S, D] and the latents of the queries [2, S, Q]."""
    indexer = INDEXER.build(rngs=nnx.Rngs(0), precision=Precision(), input_dim=WIDTH, query_dim=LATENT)
    return indexer, normal(2, LENGTH, WIDTH), normal(2, LENGTH, LATENT, seed=1)


def expected_slots(indexer, x, latents, visible):
    """Return the selected slots of each query, one query and one head at a time."""
    query, key, weight = (np.asarray(m.weight[...], np.float64) for m in (indexer.query, indexer.key, indexer.weight))
    keys = np.asarray(indexer.norm(jnp.asarray(x @ key, jnp.float32)))[:, :, None]
    queries = np.einsum("bsq,qnh->bsnh", latents, query).astype(np.float32)
    queries, keys = indexer.position(jnp.asarray(queries), jnp.asarray(keys), jnp.arange(x.shape[1])[None])
    sets = []
    for b, t in np.ndindex(x.shape[:2]):
        slots = [s for s in range(x.shape[1]) if visible(b, t, s)]
        heads = [np.maximum(np.asarray(queries[b, t, n]) @ np.asarray(keys[b, slots, 0]).T, 0) for n in range(2)]
        scores = (x[b, t] @ weight) @ np.stack(heads)
        sets.append({slots[i] for i in np.argsort(-scores, kind="stable")[:TOP]})
    return sets


def selected(mask):
    """Return the sets of selected slots."""
    return [{*row.tolist()} - {-1} for row in np.asarray(mask.slots).reshape(-1, mask.slots.shape[-1])]


def test_each_query_selects_the_visible_keys_with_the_largest_scores(built):
    indexer, x, latents = built
    layout, context = ContiguousLatentCache.Config().build(), Context()
    mask, cache = indexer(x, latents, context, Causal(), layout)
    assert cache is None
    arrays = np.asarray(x, np.float64), np.asarray(latents, np.float64)
    assert selected(mask) == expected_slots(indexer, *arrays, lambda b, t, s: s <= t)
    ids = jnp.asarray(np.repeat([1, 2], [4, 5])[None].repeat(2, 0), jnp.int32)
    packed, _ = indexer(x, latents, context, Causal() & Segments(ids, ids), layout)
    assert selected(packed) == expected_slots(indexer, *arrays, lambda b, t, s: s <= t and (s < 4) == (t < 4))
    shared = SharedSelection.Config().build(precision=Precision())
    assert selected(shared(x, latents, context, Causal(), layout)[0]) == selected(packed)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [ContiguousLatentCache.Config(), PagedLatentCache.Config(page_size=4)])
def test_a_cache_does_not_change_the_selection(built, layout):
    indexer, x, latents = built
    layout = layout.build()
    whole, _ = indexer(x, latents, Context(), Causal(), layout)
    cache, sets = empty_cache(indexer.cache_spec(layout, None), 2, 12), []
    for begin, end in ((0, 5), (5, 6), (6, 9)):
        slots = jnp.arange(begin, end, dtype=jnp.int32)[None]
        context, part = Context(positions=slots, slots=slots), slice(begin, end)
        mask, cache = indexer(x[:, part], latents[:, part], context, Causal(), layout, cache)
        sets.append(np.asarray(selected(mask)).reshape(2, -1))
    assert np.concatenate(sets, axis=1).reshape(-1).tolist() == selected(whole)


@pytest.mark.slow
def test_the_requests_of_a_serving_step_select_among_their_own_keys(built):
    indexer, x, latents = built
    layout = PagedLatentCache.Config(page_size=4).build()
    whole, _ = indexer(x, latents, Context(), Causal(), layout)
    cache = empty_cache(indexer.cache_spec(layout, None), 1, 24)
    table = jnp.asarray([[4, 0, 2], [1, 5, 3]], jnp.int32)

    def step(cache, begin, end):
        steps = np.arange(begin, end)
        write = np.asarray(table)[:, steps // 4] * 4 + steps % 4
        slots = PagedSlots(table=table, lengths=jnp.full(2, end), write=jnp.asarray(write.reshape(-1), jnp.int32),
                           split=Split(0, end - begin), pages=6, page_size=4)  # fmt: skip
        flat = [a[:, begin:end].reshape(-1, 1, a.shape[-1]) for a in (x, latents)]
        context = Context(positions=jnp.asarray(np.tile(steps, 2)[:, None], jnp.int32), slots=slots)
        return indexer(*flat, context, Causal(), layout, cache)

    first, cache = step(cache, 0, 7)
    second, cache = step(cache, 7, 9)
    expected = np.asarray(selected(whole)).reshape(2, LENGTH)
    assert selected(first) == expected[:, :7].reshape(-1).tolist()
    assert selected(second) == expected[:, 7:].reshape(-1).tolist()


@pytest.mark.slow
def test_attention_sees_only_the_selected_keys(layer, normal):
    module, dense = layer(ATTENTION, WIDTH), attrs.evolve(ATTENTION, indexer=attrs.evolve(INDEXER, top_k=LENGTH))
    x = normal(2, LENGTH, WIDTH)
    y = module(x, Context())[0]
    everything = layer(dense, WIDTH)(x, Context())[0]
    assert np.abs(y - everything)[:, :TOP].max() < 1e-6
    assert np.abs(y - everything)[:, TOP:].max() > 1e-3
    gradients = nnx.grad(lambda m: jnp.sum(m(x, Context())[0] ** 2))(module)
    flat = {".".join(map(str, path)): np.abs(g).max() for path, g in nnx.to_flat_state(gradients)}
    assert {path for path, value in flat.items() if value == 0} == {p for p in flat if p.startswith("indexer.")}


def test_a_shared_selection_needs_an_earlier_layer(layer, normal):
    module = layer(attrs.evolve(ATTENTION, indexer=SharedSelection.Config()), WIDTH)
    with pytest.raises(RequestError, match=r"no earlier layer shares 'selected_keys'"):
        jax.eval_shape(lambda x: module(x, Context())[0], normal(1, 4, WIDTH))
