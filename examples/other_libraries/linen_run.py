"""Train the quickstart with a feed-forward layer from Flax Linen."""

from flax import linen

import axlearn_core as ax
from axlearn_plugins_models.bridges.linen_layer import LinenLayer


class FeedForward(linen.Module):
    """Maps [B, S, D] to [B, S, D]."""

    hidden: int

    @linen.compact
    def __call__(self, x, train: bool):
        """Return the output. `train` is True in training steps and False in evaluation."""
        y = linen.gelu(linen.Dense(self.hidden)(x))
        return linen.Dense(x.shape[-1])(linen.Dropout(0.1, deterministic=not train)(y))


axes = {"Dense_0.kernel": ("embed", "mlp"), "Dense_1.kernel": ("mlp", "embed"), "**.bias": ("norm",)}
layer = LinenLayer.Config(module=ax.configure(FeedForward, hidden=512), axes=axes)
ax.train("quickstart", set={"model.decoder.layer.feed_forward": layer}, steps=20, run_dir="runs/linen")
