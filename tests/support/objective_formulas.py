"""Programs of small language models with an objective, and the log-probabilities of their rows in NumPy."""

import functools

import jax
import numpy as np

from axlearn_core.compose import ModelWeights, compose
from axlearn_core.config import patch
from support import toy_models


def program(*features, devices=1, shape=None, **settings):
    """Compose the small quickstart with these features."""
    cfg = toy_models.resolve(toy_models.small("quickstart"), with_=features, set=settings).config
    return compose(patch(cfg, {"mesh.shape": shape or {}}), jax.devices()[:devices])


def moved(trainer, seed=2):
    """Return a state whose model has moved from its start."""
    state, rng = trainer.init(0), np.random.default_rng(seed)
    params = {p: x + 0.1 * rng.standard_normal(x.shape, np.float32) for p, x in jax.device_get(state.params).items()}
    return state.replace(params=jax.device_put(params, {p: x.sharding for p, x in state.params.items()}))


def loss(trainer, state):
    """Return (loss, summaries) of the training objective, and its batch."""
    batch = toy_models.batch_for(trainer.config)
    return loss_of(trainer, state, batch), batch


def loss_of(trainer, state, batch):
    """Return (loss, summaries) of the training objective on a batch."""
    value = trainer.compile("loss", trainer.put(batch))(
        jax.device_put(ModelWeights(state.params, state.variables), shardings(trainer)), trainer.put(batch)
    )
    return jax.device_get(value)


def shardings(trainer):
    return jax.tree.map(lambda s: s.sharding, trainer.trained_spec)


@functools.lru_cache(maxsize=1)
def compile_logits(functional):
    return jax.jit(lambda params, tokens: functional.bind(params)(tokens))


def log_softmax(trainer, params, tokens, temperature=1.0):
    """Return the log-probabilities of the model with these parameters, float64 [B, S, V]."""
    logits = np.asarray(compile_logits(trainer.functional)(params, tokens), np.float64) / temperature
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def reference_params(state, at="objective.reference."):
    return {p.removeprefix(at): x for p, x in state.variables.items() if p.startswith(at)}


def sequence_scores(trainer, params, batch, answer):
    logs = log_softmax(trainer, params, batch[f"{answer}_tokens"])
    picked = np.take_along_axis(logs, batch[f"{answer}_targets"][..., None], -1)[..., 0]
    return (picked * batch[f"{answer}_weights"]).sum(1)
