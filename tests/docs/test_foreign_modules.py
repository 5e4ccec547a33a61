"""The documented modules of other libraries train with the default optimizer of each experiment."""

import functools

import jax
import pytest

from axlearn_core.compose import Functional
from axlearn_core.compose.program import check_program
from axlearn_core.config import patch
from support import code_blocks, toy_models
from support.paths import ROOT

PAGE = ROOT / "docs/layers.md"
SLOTS = {
    "norm": ("model.decoder.norm", "model.decoder.layer.norm"),
    "mlp": ("model.decoder.layer.feed_forward",),
}


@functools.cache
def documented():
    (text,) = (
        block.text
        for block in code_blocks.read(PAGE)
        if "linen-layer" not in block.text and "nnx.RMSNorm" in block.text
    )
    names = {}
    exec("import axlearn_core as ax\nfrom flax import nnx\ncfg = ax.resolve('quickstart').config\n" + text, names)
    return names


@pytest.mark.fast_cases("llama2-7b-norm", "llama3-8b-norm")
@pytest.mark.parametrize("name", SLOTS)
@pytest.mark.parametrize("experiment", toy_models.experiments())
def test_it_trains_with_the_optimizer_of_the_experiment(experiment, name):
    config = patch(toy_models.small(experiment), {path: documented()[name] for path in SLOTS[name]})
    assert Functional.from_config(config.model).unnamed
    trained = check_program(config)
    learner = config.learner.build(max_steps=config.max_steps, axes=trained.axes)
    params = {path: jax.ShapeDtypeStruct(s.shape, s.dtype) for path, s in trained.abstract.items()}
    state = jax.eval_shape(learner.init, params)
    jax.eval_shape(learner.update, params, state, params, jax.ShapeDtypeStruct((), "float32"))
