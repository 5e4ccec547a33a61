"""Faults for the properties of `axlearn prove`. Each replaces a function, with pytest's `monkeypatch`."""

import attrs
import jax
import jax.numpy as jnp

from axlearn_core.checkpoint import ShardedCheckpointer
from axlearn_core.learn import Learner, learner
from axlearn_core.nn import randomness
from axlearn_core.nn.remat import Remat
from axlearn_core.nn.sharding import is_sharded
from axlearn_plugins_models.huggingface import stream
from axlearn_plugins_transformer import stack
from axlearn_plugins_transformer.causal_lm import CausalLM
from axlearn_plugins_transformer.feed_forward import GatedFeedForward
from axlearn_plugins_transformer.kernels import attention, masks
from axlearn_plugins_transformer.kv_cache import ContiguousCache
from axlearn_plugins_verify.properties import adapters


def show_next_token(monkeypatch):
    original = masks.Causal.materialize

    def materialize(self, queries, keys, query_slots=None, key_slots=None):
        queries = (queries[0] + 1, queries[1] + 1) if query_slots is None else queries
        return original(self, queries, keys, query_slots, key_slots)

    monkeypatch.setattr(masks.Causal, "materialize", materialize)
    monkeypatch.setattr(masks.Causal, "block", lambda *_: None)


def show_all_documents(monkeypatch):
    monkeypatch.setattr(masks.visible, "__defaults__", masks.visible.__defaults__)
    monkeypatch.setattr(masks.Segments, "materialize", lambda *_: jnp.ones((1, 1, 1), bool))


def count_padding(monkeypatch):
    original = CausalLM.loss

    def loss(self, batch):
        value, report = original(self, batch)
        return value + 0.01 * jnp.mean(batch["tokens"].astype(jnp.float32)), report

    monkeypatch.setattr(CausalLM, "loss", loss)


def scale_scanned_layers(monkeypatch):
    original = stack._layer

    def layer(graphs, context, remat, shared, kind, in_loop=False):
        run = original(graphs, context, remat, shared, kind, in_loop)
        return (lambda carry, *args: run((1.01 * carry[0], carry[1]), *args)) if in_loop else run

    monkeypatch.setattr(stack, "_layer", layer)


def stop_gradients_of_remat(monkeypatch):
    monkeypatch.setattr(
        Remat,
        "wrap",
        lambda self, function, in_loop: lambda carry, *args: function(jax.lax.stop_gradient(carry), *args),
    )


def overwrite_cache(monkeypatch):
    original = ContiguousCache.append
    monkeypatch.setattr(
        ContiguousCache, "append", lambda self, cache, key, value, slots: original(self, cache, key, value, slots * 0)
    )


def stop_gradients_of_layer(monkeypatch):
    original = GatedFeedForward.__call__
    monkeypatch.setattr(GatedFeedForward, "__call__", lambda self, x: jax.lax.stop_gradient(original(self, x)))


def keep_final_norm(monkeypatch):
    original, path = Learner.update, "decoder.norm.weight"

    def update(self, grads, state, params, loss):
        new, *rest = original(self, grads, state, params, loss)
        return {**new, path: params[path]}, *rest

    monkeypatch.setattr(Learner, "update", update)


def drop_z_loss(monkeypatch):
    original = CausalLM._options
    monkeypatch.setattr(CausalLM, "_options", lambda self, z_loss=0.0: original(self))


def average_slowly(monkeypatch):
    original = Learner._update_average
    monkeypatch.setattr(
        Learner, "_update_average", lambda self, average, new: original(self, average, original(self, average, new))
    )


def merge_without_scale(monkeypatch):
    original = adapters.merge
    monkeypatch.setattr(adapters, "merge", lambda params, scales: original(params, dict.fromkeys(scales, 1.0)))


def round_export(monkeypatch):
    original = stream.values
    monkeypatch.setattr(stream, "values", lambda *args: (x.astype("float16").astype(x.dtype) for x in original(*args)))


def repeat_step(monkeypatch):
    original = ShardedCheckpointer.restore

    def restore(self, step, like):
        state, extra = original(self, step, like)
        return state.replace(step=state.step - 1), extra

    monkeypatch.setattr(ShardedCheckpointer, "restore", restore)


def drop_soft_cap(monkeypatch):
    original = attention._XLABlocked.__call__
    monkeypatch.setattr(
        attention._XLABlocked, "__call__", lambda self, op: original(self, attrs.evolve(op, softcap=None))
    )


def share_masks(monkeypatch):
    original = randomness.split_leading

    def split(array, sizes):
        parts = original(array, sizes)
        return [parts[0]] * len(parts) if randomness.is_key(array) else parts

    monkeypatch.setattr("axlearn_plugins_transformer.stack_layers.randomness.split_leading", split)


def scale_sharded_layers(monkeypatch):
    original = GatedFeedForward.__call__
    monkeypatch.setattr(
        GatedFeedForward, "__call__", lambda self, x: (1.01 if is_sharded() else 1.0) * original(self, x)
    )


def scale_microbatches(monkeypatch):
    original = learner.value_and_grad

    def value_and_grad(loss, params, variables, batch, key, steps):
        value, gradients = original(loss, params, variables, batch, key, steps)
        return value, gradients if steps == 1 else jax.tree.map(lambda g: 1.1 * g, gradients)

    monkeypatch.setattr(learner, "value_and_grad", value_and_grad)
