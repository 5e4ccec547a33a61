"""Cases of tiny configs, for the properties of `axlearn prove`."""

import functools
import importlib.metadata
import math

import jax

from axlearn_core.compose import ModelWeights, compose
from axlearn_core.config import Node, find, patch
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.plugins.resolve import resolve
from support import toy_models

SIZES = {
    "input.sequence_length": 16,
    "input.batch_size": 8,
    "model.vocab_size": toy_models.VOCABULARY,
    "model.decoder.num_layers": 2,
    "model.**.hidden_dim": 64,
    "model.decoder.hidden_dim": 32,
    "model.**.attention.num_heads": 4,
    "model.**.attention.num_kv_heads": 2,
    "model.**.attention.head_dim": 8,
    "model.**.attention.rope_head_dim": 4,
    "model.**.attention.value_head_dim": 8,
    "model.**.attention.kv_rank": 16,
    "model.**.attention.query_rank": 16,
    "model.**.num_experts": 4,
    "model.**.top_k": 2,
    "model.**.num_groups": 1,
    "model.**.top_groups": 1,
}


class ProofCase:
    """The parts of `axlearn_plugins_verify.prove.case.Case` that properties need, for configs that are tiny already."""

    def __init__(self, config, original=None, seed=0, target=None):
        self.target = target
        self.config, self.original, self.seed = config, original or config, seed
        self.meshes = (dict(config.mesh.shape),) if math.prod(config.mesh.shape.values()) > 1 else ()
        self._programs, self._weights = {}, {}

    def program(self, config=None, shape=None):
        config, shape = config or self.config, shape or {"fsdp": 1}
        config = patch(config, {"mesh": Mesh(shape=shape, rules=config.mesh.rules)})
        if config not in self._programs:
            self._programs[config] = compose(config, jax.devices()[: math.prod(shape.values())])
        return self._programs[config]

    def weights(self, config=None, seed=0):
        config = config or self.config
        if config not in self._weights:
            trained = self.program(config).trained
            variables = {p: toy_models.filled_one(p, s) for p, s in trained.variables.items()}
            self._weights[config] = ModelWeights(toy_models.filled(trained), variables)
        return self._weights[config]

    def batch(self, seed=0):
        return toy_models.batch_for(self.config, seed)


@functools.cache
def tiny(experiment, with_=(), set_=()):
    """Return an experiment with features and settings, at a tiny size."""
    cfg = resolve(experiment).config
    edits = {}
    for pattern, value in SIZES.items():
        for path, old in find(cfg, pattern).items():
            if isinstance(old, (int, Node)) and not isinstance(old, bool):
                edits[path] = value
    return resolve(patch(cfg, edits), with_=list(with_), set=list(set_)).config


def case(experiment="quickstart", with_=(), set_=(), seed=0):
    """Return the case of a tiny config."""
    original = resolve(experiment, with_=list(with_), set=list(set_)).config
    return ProofCase(tiny(experiment, tuple(with_), tuple(set_)), original, seed)


def load_property(name):
    """Return an installed property."""
    (entry,) = importlib.metadata.entry_points(group="axlearn.properties", name=name)
    return entry.load()()
