"""Sequences that share a row have the losses and gradients of sequences with rows of their own."""

import jax
import numpy as np
import pytest

from axlearn_core.compose import compose
from axlearn_core.config import patch
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_rl.presets import PRESETS, build_preset
from support.rollout_batches import random_batch

SMALL = {
    "mesh.shape": {},
    "model.vocab_size": 64,
    "model.decoder.num_layers": 2,
    "model.decoder.hidden_dim": 32,
    "model.decoder.layer.attention.num_heads": 2,
    "model.decoder.layer.feed_forward.hidden_dim": 64,
}
LENGTH = 16


def unpack(packed):
    """Give each sequence of a batch a row of its own."""
    rows = []
    for row, ids in enumerate(packed["segment_ids"]):
        for number in np.unique(ids[ids > 0]):
            where = np.flatnonzero(ids == number)
            fields = {name: x[row, where] for name, x in packed.items() if x.ndim == 2}
            padded = {name: np.pad(x, (0, LENGTH - len(where))) for name, x in fields.items()}
            rows.append({**padded, "temperature": packed["temperature"][row]})
    return {name: np.stack([row[name] for row in rows]) for name in rows[0] if name != "segment_ids"}


def loss_and_gradients(objective, batch):
    config = patch(resolve("quickstart", set=SMALL).config, {"objective": objective})
    program = compose(config, jax.devices()[:1])
    state, functions = program.init(0), program.functions["train"].call.__self__
    rng = np.random.default_rng(2)
    params = {p: x + 0.1 * rng.standard_normal(x.shape).astype(np.float32) for p, x in state.params.items()}

    def loss(params):
        return functions.training_loss(params, state.variables, batch, jax.random.key(0))[0]

    with program.tracing("train"):
        value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    return float(value), jax.device_get(gradients)


@pytest.mark.slow
@pytest.mark.parametrize("method", PRESETS)
def test_packing_changes_neither_losses_nor_gradients(method):
    objective = build_preset(method).objective
    packed = random_batch(rows=4, length=LENGTH, packed=True)
    separate = unpack(packed)
    assert len(separate["tokens"]) == 8
    value, gradients = loss_and_gradients(objective, packed)
    expected, expected_gradients = loss_and_gradients(objective, separate)
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-7)
    assert gradients.keys() == expected_gradients.keys()
    for path, gradient in gradients.items():
        scale = np.abs(expected_gradients[path]).max()
        np.testing.assert_allclose(gradient, expected_gradients[path], atol=1e-5 * scale + 1e-9, err_msg=path)
