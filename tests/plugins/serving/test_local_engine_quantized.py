"""Serving of quantized weights gives the tokens that the model generates one request at a time."""

import attrs
import jax
import numpy as np
import pytest

from axlearn_core.compose import Functional
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_quantization.feature import weight_only_config
from axlearn_plugins_quantization.store import quantize_params
from axlearn_plugins_serving.local_engine import serve
from axlearn_plugins_transformer.generate import Generator
from support.serving_models import config, model

SIZES = {
    "runner.block_size": 4, "runner.max_context": 48, "runner.max_rows": 4, "runner.num_blocks": 22,
    "runner.max_step_tokens": 24, "runner.chunk": 8, "runner.row_buckets": (), "runner.chunk_buckets": (),
}  # fmt: skip
TILES = {"int8": None, "int4": 16}


def quantized(storage):
    """Build the small quickstart with weights stored as integers."""
    whole = weight_only_config(
        attrs.evolve(resolve("quickstart").config, model=config()), storage, tile_size=TILES[storage]
    )
    functional = Functional.from_config(whole.model)
    params = quantize_params(Functional.from_config(config()).extract_weights(model()).params, functional)
    split = {p: params[p] for p in functional.abstract}, {p: params[p] for p in functional.variables}
    return functional.bind(*split)


@pytest.mark.slow
@pytest.mark.parametrize("storage", TILES)
def test_each_request_gets_the_tokens_that_it_gets_alone(storage):
    narrow = quantized(storage)
    dtypes = {str(x.dtype) for x in jax.tree.leaves(Functional.from_config(narrow.cfg).extract_weights(narrow))}
    assert storage in dtypes
    prompts = [np.random.default_rng(i).integers(0, 64, 2 + 3 * i).tolist() for i in range(6)]
    with serve(narrow, set=SIZES) as engine:
        results = engine.generate(prompts, max_tokens=12, temperature=0)
        assert engine.statistics().compilations == 0
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == tuple(Generator(narrow)(prompt, max_tokens=12))
