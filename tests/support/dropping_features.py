"""Features of third parties: some add parts to attention, and each of the others drops the effect of another feature.

With `careful=true`, they make the same change and drop nothing.
"""

from typing import Any

import attrs
import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import REQUIRED, Node, get_fields, interface, map, node, patch, replace_config
from axlearn_core.config.tree import edit_nodes, fill_slots
from axlearn_core.config.wrappers import edit_innermost
from axlearn_core.errors import Problem
from axlearn_core.learn import AdamW, Cosine
from axlearn_core.nn.layer import Layer, Precision
from axlearn_core.nn.linear import Linear
from axlearn_core.nn.remat import Remat
from axlearn_core.plugins.feature import Feature
from axlearn_core.train import TrainLoop
from axlearn_core.train.objective import ModelLoss
from axlearn_core.train.trackers import JsonlTracker
from axlearn_plugins_moe.mixture_of_experts import MixtureOfExperts
from axlearn_plugins_moe.routers import SoftmaxRouter
from axlearn_plugins_transformer.alternate import Alternate
from axlearn_plugins_transformer.attention import Attention, AttentionLayer
from axlearn_plugins_transformer.cache_spec import spec_of
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.layer_roles import AttentionKernelRole
from axlearn_plugins_transformer.transformer import TransformerLayer

NO_MATCH = Problem(path="model", message="there is no attention to change", fix="leave the feature out")


class SinkAttention(Attention):
    """Attention with a learned sink for each head, as in gpt-oss."""

    @node
    class Config(Attention.Config):
        """The same settings."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, rngs=rngs, precision=precision)
        self.sinks = nnx.Param(jnp.zeros(cfg.num_heads), out_sharding=("heads",))

    def scores(self, query: jax.Array, key: jax.Array, value: jax.Array, context: Any) -> AttentionOp:
        """Return the op with sinks."""
        return attrs.evolve(super().scores(query, key, value, context), sinks=self.sinks[...])


class OutputGate(Layer):
    """Scales the output of the attention that it wraps."""

    @node
    class Config(Layer.Config["OutputGate"]):
        """The attention."""

        input_dim: int = interface(default=REQUIRED)
        inner: Node[AttentionLayer] = REQUIRED

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        self.inner = self.child(cfg.inner, rngs=rngs, input_dim=cfg.input_dim)
        self.gate = nnx.Param(jnp.ones(cfg.input_dim), out_sharding=("embed",))

    def cache_spec(self) -> Any:
        """Return the entries of the cache of the attention."""
        return spec_of(self.inner)

    def __call__(self, x: jax.Array, *args: Any) -> Any:
        """Return the scaled output and the cache."""
        y, cache = self.inner(x, *args)
        return y * self.gate[...][None, None].astype(y.dtype), cache


@node
class AddSinks(Feature):
    """Adds sinks to attention."""

    stage = "replace"

    def apply(self, cfg):
        """Replace attention with attention with sinks."""
        return replace_config(cfg, Attention, SinkAttention.Config())


@node
class AddGate(Feature):
    """Adds a gate to the output of attention."""

    stage = "wrap"
    after = ("lora",)

    def apply(self, cfg):
        """Wrap attention."""

        def block(_path, part):
            if isinstance(part, TransformerLayer.Config) and not isinstance(part.attention, OutputGate.Config):
                return attrs.evolve(part, attention=OutputGate.Config(inner=part.attention))
            return None

        return edit_nodes(cfg, block, no_match=None)


@node
class AddDecay(Feature):
    """Decays the learning rate along a cosine."""

    def apply(self, cfg):
        """Set the schedule."""
        return patch(cfg, {"learner.optimizer.learning_rate": Cosine(peak=1e-3, end_ratio=0.05)})


@node
class PackDocuments(Feature):
    """Packs whole documents into rows."""

    def apply(self, cfg):
        """Set the packing."""
        return patch(cfg, {"input.packing": "first-fit"})


class _Careless(Feature):
    """Base of the features that drop something."""

    careful: bool


@node
class DropSinks(_Careless):
    """Caps scores. It writes a new attention node and knows only the fields of the core's attention."""

    careful: bool = False

    def apply(self, cfg):
        """Replace attention."""
        names = {a.name for a in attrs.fields(Attention.Config)}

        def cap(part):
            if not isinstance(part, Attention.Config):
                return part
            fields = {k: v for k, v in get_fields(part).items() if k in names}
            return attrs.evolve(part, softcap=50.0) if self.careful else Attention.Config(**{**fields, "softcap": 50.0})

        return map(cfg, cap)


@node
class OverwriteWrapped(_Careless):
    """Adds biases to the query maps. It fills the slot, and does not look at what wraps the map."""

    careful: bool = False

    def apply(self, cfg):
        """Set the query map."""

        def bias(part):
            if not isinstance(part, Attention.Config):
                return part
            edit = lambda old: attrs.evolve(old, bias=True)  # noqa: E731
            return attrs.evolve(
                part, query=edit_innermost(part.query, edit) if self.careful else Linear.Config(bias=True)
            )

        return map(cfg, bias)


@node
class ResetKernel(_Careless):
    """Caps scores. It resets the kernel, because its author used one without soft caps."""

    careful: bool = False

    def apply(self, cfg):
        """Set the cap and the kernel."""
        values = {"softcap": 50.0} if self.careful else {"softcap": 50.0, "kernel": None}
        return map(cfg, lambda p: attrs.evolve(p, **values) if isinstance(p, AttentionKernelRole) else p)


@node
class DropWindow(_Careless):
    """Alternates attention with and without soft caps. It forgets the windows of the layers that it copies."""

    careful: bool = False
    stage = "wrap"

    def apply(self, cfg):
        """Alternate attention."""

        def fill(_path, old):
            if not isinstance(old, Attention.Config):
                return None
            base = old if self.careful else attrs.evolve(old, window=None)
            return Alternate(children=(attrs.evolve(base, softcap=50.0), base))

        return fill_slots(cfg, AttentionLayer, fill, no_match=NO_MATCH)


@node
class DropSchedule(_Careless):
    """Trains with AdamW at a constant rate."""

    careful: bool = False

    def apply(self, cfg):
        """Set the optimizer."""
        rate = cfg.learner.optimizer.learning_rate if self.careful else 1e-3
        return patch(cfg, {"learner.optimizer": AdamW(learning_rate=rate, b2=0.98)})


@node
class OverwriteRemat(_Careless):
    """Caps scores and saves the queries. It does not keep the remat policy that is there."""

    careful: bool = False

    def apply(self, cfg):
        """Set the cap and the remat of the stack."""
        edits = {"model.decoder.layer.attention.softcap": 50.0}
        return patch(
            cfg, edits if self.careful else {**edits, "model.decoder.stack.remat": Remat.Config(save=("query",))}
        )


@node
class ResetDtype(_Careless):
    """Caps scores and computes them in float32, by way of the dtype of the whole model."""

    careful: bool = False

    def apply(self, cfg):
        """Set the dtypes."""
        place = "model.decoder.layer.attention.dtype" if self.careful else "model.dtype"
        return patch(cfg, {place: "float32", "model.decoder.layer.attention.softcap": 50.0})


@node
class DropLoss(_Careless):
    """Adds a z-loss. It puts the model's own loss into the slot of the objective."""

    careful: bool = False

    def apply(self, cfg):
        """Set the objective."""
        edits = {"model.z_loss": 1e-4}
        return patch(cfg, edits if self.careful else {**edits, "objective": ModelLoss.Config()})


@node
class ReplaceRouter(_Careless):
    """Chooses three experts per token. It replaces the router, and its balancing bias is lost."""

    careful: bool = False
    needs = ("moe",)

    def apply(self, cfg):
        """Set the router."""

        def route(part):
            if not isinstance(part, MixtureOfExperts.Config):
                return part
            return (
                attrs.evolve(part, top_k=3)
                if self.careful
                else attrs.evolve(part, top_k=3, router=SoftmaxRouter.Config())
            )

        return map(cfg, route)


@node
class ReplaceInput(_Careless):
    """Reads longer rows. It writes a new input and forgets the packing."""

    careful: bool = False

    def apply(self, cfg):
        """Set the input."""
        old = cfg.input
        new = attrs.evolve(old, sequence_length=2 * old.sequence_length)
        return patch(cfg, {"input": new if self.careful else attrs.evolve(new, packing="concat")})


@node
class ForgetRules(_Careless):
    """Trains the embedding more slowly. It replaces the rules of all parameters."""

    careful: bool = False

    def apply(self, cfg):
        """Set the rules."""
        from axlearn_core.learn import ParameterRule

        rule = ParameterRule(pattern="decoder.head.**", learning_rate_scale=0.5)
        return patch(cfg, {"learner.rules": (*(cfg.learner.rules if self.careful else ()), rule)})


@node
class FlattenLayers(_Careless):
    """Caps scores in all layers. It replaces layers of several kinds by the last kind."""

    careful: bool = False

    def apply(self, cfg):
        """Set the attention of the layer."""
        old = cfg.model.decoder.layer.attention
        if not self.careful and isinstance(old, Alternate):
            old = old.children[-1]
        edit = lambda p: attrs.evolve(p, softcap=50.0) if isinstance(p, Attention.Config) else p  # noqa: E731
        return patch(cfg, {"model.decoder.layer.attention": edit_innermost(old, edit)})


@node
class ForgetTrackers(_Careless):
    """Logs every step. It replaces the list of trackers."""

    careful: bool = False

    def apply(self, cfg):
        """Set the trackers."""
        return patch(
            cfg, {"log_every_steps": 1, "trackers": cfg.trackers if self.careful else (JsonlTracker.Config(),)}
        )


@node
class ReplaceLoop(_Careless):
    """Stops at the first step that is not finite. It writes a new loop."""

    careful: bool = False

    def apply(self, cfg):
        """Set the loop."""
        loop = cfg.loop if self.careful else TrainLoop.Config()
        return patch(cfg, {"loop": attrs.evolve(loop, max_nonfinite_steps=0)})


@node
class RemoveWrapper(_Careless):
    """Caps scores. It takes attention out of its wrapper."""

    careful: bool = False

    def apply(self, cfg):
        """Set the attention of the layer."""
        old = cfg.model.decoder.layer.attention
        cap = lambda p: attrs.evolve(p, softcap=50.0)  # noqa: E731
        if self.careful:
            return patch(cfg, {"model.decoder.layer.attention": edit_innermost(old, cap)})
        return patch(
            cfg, {"model.decoder.layer.attention": cap(old.inner if isinstance(old, OutputGate.Config) else old)}
        )


ADDING = {"sinks": AddSinks, "gated-output": AddGate, "cosine": AddDecay, "pack": PackDocuments}
"""Features whose effects are dropped, in addition to the installed ones."""

PLANTED = {
    "drop-sinks": (DropSinks, "sinks", "model.decoder.layer.attention"),
    "overwrite-wrapped": (OverwriteWrapped, "lora", "model.decoder.layer.attention.query"),
    "reset-kernel": (ResetKernel, "context-parallel", "model.decoder.layer.attention.kernel"),
    "drop-window": (DropWindow, "interleave", "model.decoder.layer.attention.window"),
    "drop-schedule": (DropSchedule, "cosine", "learner.optimizer.learning_rate"),
    "overwrite-remat": (OverwriteRemat, "remat:policy=dots", "model.decoder.stack.remat.save"),
    "reset-dtype": (ResetDtype, "precision:dtype=bfloat16", "model.dtype"),
    "drop-loss": (DropLoss, "distill:temperature=2.0", "objective"),
    "replace-router": (ReplaceRouter, "moe:router={type: sigmoid-router}", "model.decoder.layer.feed_forward.router"),
    "replace-input": (ReplaceInput, "pack", "input.packing"),
    "forget-rules": (ForgetRules, "freeze:pattern=decoder.embedding.**", "learner.rules"),
    "flatten-layers": (FlattenLayers, "mamba2", "model.decoder.layer.attention"),
    "forget-trackers": (ForgetTrackers, "prometheus", "trackers"),
    "replace-loop": (ReplaceLoop, "sdc-check:every_steps=2", "loop.check"),
    "remove-wrapper": (RemoveWrapper, "gated-output", "model.decoder.layer.attention"),
}
"""Name of a feature -> (its class, the feature whose effect it drops, path of the effect)."""


def points():
    """Return the entry points of all features in this module."""
    classes = {**ADDING, **{name: cls for name, (cls, *_) in PLANTED.items()}}
    return {"features": {name: f"{__name__}:{cls.__name__}" for name, cls in classes.items()}}
