"""The layout that caches the keys and values of latent attention instead of its latents."""

import pytest
from flax import nnx

from axlearn_core.config import patch
from axlearn_core.errors import RequestError
from axlearn_plugins_transformer.attention_variants.expanded_latent_cache import ExpandedLatentCache
from axlearn_plugins_transformer.generate import Generator
from axlearn_plugins_transformer.kv_cache import ContiguousCache
from axlearn_plugins_transformer.paged_cache import PagedCache
from support.serving_models import config

PATH = "decoder.layer.attention.latent_cache"


def generate(layout=None):
    """Generate with a layout. Values are smaller than the keys, which have positional parts."""
    cfg = config("mla") if layout is None else patch(config("mla"), {PATH: layout})
    return list(Generator(cfg.build(rngs=nnx.Rngs(0)))([3, 1, 4, 1, 5], max_tokens=8))


@pytest.mark.slow
def test_tokens_equal_those_of_cached_latents():
    pages = PagedCache.Config(page_size=4, heads_first=True)
    assert generate(ExpandedLatentCache.Config(kv_cache=pages)) == generate()


def test_pages_hold_keys_and_values_of_every_head():
    attention = (
        patch(config("mla"), {PATH: ExpandedLatentCache.Config()}).build(rngs=nnx.Rngs(0)).decoder.layer.attention
    )
    size = attention.head_dim + attention.rope_dim
    assert attention.cache_spec()["pages"].shape == (2, attention.cfg.num_heads, 16, size)


def test_layouts_that_need_equal_sizes_are_refused():
    layout = ExpandedLatentCache.Config(kv_cache=PagedCache.Config(page_size=4))
    with pytest.raises(RequestError, match="values of the same size, or smaller ones with heads_first"):
        generate(layout)


def test_an_indexer_is_refused():
    with pytest.raises(RequestError, match="leave out the indexer"):
        ExpandedLatentCache.Config(kv_cache=ContiguousCache.Config()).build().spec(8, "float32")
