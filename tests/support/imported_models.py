"""Fixtures of Hugging Face families, imported, with what transformers computes for them."""

import functools
import json

import jax
from safetensors.numpy import load_file

from axlearn_core.compose import compose
from axlearn_core.run import bind_weights
from axlearn_plugins_models.huggingface.source import open_model
from support import generated_models
from support.paths import HF_FIXTURES

MODELS = sorted(p.name for p in HF_FIXTURES.iterdir())
SETTINGS = ("model.dtype=float32", "model.decoder.stack.mode=unrolled")


def folder(name):
    """Return the folder of a model: the fixture, or one with other weights for a name that ends with `now`."""
    return generated_models.generate(name.removesuffix(" now")) if name.endswith(" now") else HF_FIXTURES / name


@functools.cache
def expected_results(name):
    """What transformers computes."""
    return load_file(folder(name) / "expected.safetensors")


@functools.cache
def opened(name):
    """The opened directory, in float32."""
    return open_model(folder(name), set=list(SETTINGS))


@functools.cache
def loaded(name):
    """Return (source, parameters, model, expected results), in float32."""
    source = opened(name)
    state = compose(source.config, jax.devices()[:1]).state
    params = source.read({**state.params, **state.variables})
    return source, params, bind_weights(source.model, params), expected_results(name)


def model_types():
    """model_type -> the fixtures of that type."""
    types = {}
    for name in MODELS:
        data = json.loads((HF_FIXTURES / name / "config.json").read_text())
        types.setdefault(data["model_type"], []).append(name)
    return types
