"""Losses of an experiment on a mesh."""

import math

import jax
import numpy as np

import axlearn_core as ax
from axlearn_core.extend import Mesh, compose


def losses_on_mesh(experiment, shape, *features, **settings):
    """Return the losses of three steps on random tokens below 2048. The settings are those of `--set`."""
    config = ax.resolve(experiment, with_=features, set=settings).config
    config = ax.patch(config, {"mesh": Mesh(shape=shape, rules=config.mesh.rules)})
    program = compose(config, jax.devices()[: math.prod(shape.values())])
    rows = np.random.default_rng(0).integers(0, 2048, (8, 33))
    batch = program.put({"tokens": rows[:, :-1].astype(np.int32), "targets": rows[:, 1:].astype(np.int32)})
    state, losses = program.init(0), []
    for _ in range(3):
        state, summaries = program.train_step(state, batch)
        losses.append(float(summaries["loss"]))
    return losses
