"""Train the quickstart with a feed-forward layer from Equinox."""

import equinox as eqx
import jax

import axlearn_core as ax
from axlearn_plugins_models.bridges.equinox_layer import EquinoxLayer

module = ax.configure(
    eqx.nn.MLP, "in_size=input_dim", "out_size=input_dim", width_size=512, depth=1, activation=jax.nn.gelu
)
axes = {"layers.0.weight": ("mlp", "embed"), "layers.1.weight": ("embed", "mlp"), "**.bias": ("norm",)}
layer = EquinoxLayer.Config(module=module, axes=axes)
ax.train("quickstart", set={"model.decoder.layer.feed_forward": layer}, steps=20, run_dir="runs/equinox")
