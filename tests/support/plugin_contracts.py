"""Contracts that this repository's plugins define, and formulas of layers that cannot be tested with finite differences.

The output of a routed layer jumps when a token changes its experts. The gradients of a quantized layer ignore its rounding.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_plugins_models.vit.model import ImageClassifier
from axlearn_plugins_transformer.altup import STREAMS, AltUpLayer
from axlearn_plugins_transformer.per_layer import PER_LAYER, PerLayerGate
from axlearn_plugins_transformer.recurrence import Sequences
from axlearn_testing.contracts import B, Contract, D, S, context, like, normal

EXPERTS, TOP_K, VOCABULARY = 8, 2, 32
IMAGES = normal(B, 8, 8, 3)


class OfImages(Contract):
    """Contracts of image models. They are called like text models, with other batches."""

    def fits(self, config):
        return type(config).owner is ImageClassifier


class OfAltUp(Contract):
    """The contract of layers that need other streams."""

    def fits(self, config):
        return type(config).owner is AltUpLayer


CONTRACTS = (
    OfAltUp(
        name="altup-layer",
        arguments=("x", "context"),
        offered={"input_dim": D},
        inputs=lambda rng: (
            *normal(B, S, D)(rng),
            dataclasses.replace(context(rng), shared={STREAMS: normal(3, B, S, D)(rng)[0]}),
        ),
        outputs=lambda inputs, dtype: (like(0, B, S, D)(inputs, dtype), None),
    ),
    OfImages(
        name="model",
        arguments=("batch",),
        inputs=lambda rng: ({"images": IMAGES(rng)[0], "labels": rng.integers(0, 8, B, np.int32)},),
        method="loss",
    ),
    Contract(name="images", arguments=("images",), offered={"dim": D}, inputs=IMAGES, outputs=like(0, B, 5, D)),
    Contract(
        name="router",
        arguments=("x",),
        offered={"input_dim": D, "num_experts": EXPERTS, "top_k": TOP_K},
        inputs=normal(B, S, D),
    ),
    Contract(
        name="convolution",
        arguments=("x", "sequences", "state"),
        offered={"channels": (D,), "axes": ("embed",)},
        inputs=lambda rng: (normal(B, S, D)(rng)[0], Sequences(), None),
        outputs=None,
    ),
    Contract(
        name="per-layer-inputs",
        arguments=("tokens", "embeddings"),
        offered={"vocab_size": VOCABULARY, "input_dim": D, "num_layers": 3},
        inputs=lambda rng: (rng.integers(0, VOCABULARY, (B, S), np.int32), *normal(B, S, D)(rng)),
        outputs=None,
    ),
    Contract(
        name="per-layer-gate",
        arguments=("x", "layer_inputs"),
        offered={"input_dim": D},
        inputs=lambda rng: (*normal(B, S, D)(rng), {PER_LAYER: normal(B, S, PerLayerGate.Config().dim)(rng)[0]}),
        outputs=like(0, B, S, D),
    ),
    Contract(
        name="position-embedding",
        arguments=("positions",),
        offered={"dim": D},
        inputs=lambda rng: (context(rng).positions,),
        outputs=like(0, B, S, D),
    ),
)


def linear(params, x):
    """Compute the layer that a quantized linear layer approximates."""
    return jnp.einsum("bsd,dnh->bsnh", x, params["weight"])


def best(by, of):
    """Return (expert, weight), [B, 2 * S] each: the two largest weights of each token."""
    expert = jnp.argsort(-by, axis=-1)[..., :TOP_K]
    weight = jnp.take_along_axis(of, expert, axis=-1)
    weight = weight / weight.sum(-1, keepdims=True)
    return tuple(jnp.concatenate([a[..., k] for k in range(TOP_K)], axis=1) for a in (expert, weight))


def softmax_router(params, x):
    """Shazeer et al., 2017."""
    p = jax.nn.softmax(x @ params["weight"], axis=-1)
    return (*best(p, p), None)


def sigmoid_router(params, x):
    """Return the routing of DeepSeek-V3, with its initial bias of zero."""
    scores = jax.nn.sigmoid(x @ params["weight"])
    return (*best(jax.lax.stop_gradient(scores), scores), None)


def expert_choice_router(params, x):
    """Return expert-choice routing (Zhou et al., 2022): each expert picks its best tokens."""
    p = jax.nn.softmax(x @ params["weight"], axis=-1)
    room = S * TOP_K // EXPERTS
    choices = [jnp.argsort(-p[..., e], axis=1)[:, :room] for e in range(EXPERTS)]
    weight = [jnp.take_along_axis(p[..., e], t, axis=1) for e, t in enumerate(choices)]
    expert = [jnp.full((B, room), e, jnp.int32) for e in range(EXPERTS)]
    return tuple(jnp.concatenate(parts, axis=1) for parts in (expert, weight, choices))


def mixture_of_experts(params, x):
    """Compute every expert for every token, weighted by the router."""
    expert, weight, _ = softmax_router({"weight": params["router.weight"]}, x)
    shares = sum(jax.nn.one_hot(e, EXPERTS) * w[..., None] for e, w in zip(
        jnp.split(expert, TOP_K, axis=1), jnp.split(weight, TOP_K, axis=1), strict=True))  # fmt: skip
    y = jnp.zeros_like(x)
    for e in range(EXPERTS):
        hidden = jax.nn.silu(x @ params["gate.weight"][e]) * (x @ params["up.weight"][e])
        y = y + shares[..., e, None] * (hidden @ params["down.weight"][e])
    return y


def convolve(x, weight, bias, ids):
    """Sum the products of the latest inputs of the same document with the weights."""
    y = jnp.zeros_like(x) if bias is None else jnp.broadcast_to(bias[None, None], x.shape)
    for distance in range(weight.shape[0]):
        earlier, same = jnp.roll(x, distance, axis=1), jnp.roll(ids, distance, axis=1) == ids
        same = same & (jnp.arange(x.shape[1]) >= distance)[None]
        y = y + jnp.where(same[..., None, None], earlier * weight[-1 - distance][None, None], 0)
    return jax.nn.silu(y)


def recur(query, key, value, decay, strength, ids):
    """Compute linear attention, one token at a time."""
    repeats = value.shape[2] // query.shape[2]
    query, key = (jnp.repeat(x, repeats, axis=2) for x in (query, key))
    same = jnp.roll(ids, 1, axis=1) == ids

    def step(state, token):
        q, k, v, g, b, same = token
        state = jnp.where(same[:, None, None, None], state, 0) * jnp.exp(g)[..., None, None]
        if b is not None:
            v = b[..., None] * (v - jnp.einsum("bhk,bhkv->bhv", k, state))
        state = state + k[..., None] * v[:, :, None]
        return state, jnp.einsum("bhk,bhkv->bhv", q, state)

    state = jnp.zeros((len(value), *key.shape[2:], value.shape[-1]))
    tokens = [None if x is None else jnp.moveaxis(x, 1, 0) for x in (query, key, value, decay, strength, same)]
    return jnp.moveaxis(jax.lax.scan(step, state, tuple(tokens))[1], 0, 1)


def gated_delta_net(params, x, context):
    """Yang et al., 2024, with a convolution and an output gate."""
    maps = {n: jnp.einsum("bsd,dhk->bshk", x, params[f"{n}.weight"]) for n in ("query", "key", "value", "gate")}
    q, k, v = (
        convolve(maps[n], params[f"convolutions.{n}.weight"], None, context.segment_ids)
        for n in ("query", "key", "value")
    )
    q, k = (y / jnp.sqrt(jnp.sum(y * y, -1, keepdims=True) + 1e-6) for y in (q, k))
    decay = -jnp.exp(params["log_rate"])[None, None] * jax.nn.softplus(
        x @ params["decay.weight"] + params["time_bias"][None, None]
    )
    strength = jax.nn.sigmoid(x @ params["strength.weight"])
    y = recur(q, k, v, decay, strength, context.segment_ids) * q.shape[-1] ** -0.5
    y = y / jnp.sqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * params["norm.weight"][None, None, None]
    return jnp.einsum("bshv,hvd->bsd", y * jax.nn.silu(maps["gate"]), params["output.weight"]), None


def mamba2(params, x, context):
    """Dao & Gu, 2024."""
    names = ("query", "key", "value")
    maps = {n: jnp.einsum("bsd,dhk->bshk", x, params[f"{n}.weight"]) for n in (*names, "gate")}
    weights = {n: (params[f"convolutions.{n}.weight"], params[f"convolutions.{n}.bias"]) for n in names}
    q, k, v = (convolve(maps[n], *weights[n], context.segment_ids) for n in names)
    step = jax.nn.softplus(x @ params["step.weight"] + params["step_bias"][None, None])
    y = recur(q, k, v * step[..., None], -jnp.exp(params["log_rate"])[None, None] * step, None, context.segment_ids)
    y = (y + params["skip"][None, None, :, None] * v) * jax.nn.silu(maps["gate"])
    y = y / jnp.sqrt(jnp.mean(y * y, (-2, -1), keepdims=True) + 1e-5) * params["norm"][None, None]
    return jnp.einsum("bshv,hvd->bsd", y, params["output.weight"]), None


ANY_INPUTS = Contract(
    name="wrapped", arguments=("inputs",), offered={"input_dim": D}, inputs=normal(B, S, D), outputs=like(0)
)
"""Contract of a layer that passes its arguments through."""

REFERENCES = {
    "linen-layer": {"contract": ANY_INPUTS},
    "quantized-linear": {"reference": staticmethod(linear), "reference_tolerance": 0.02},
    **{
        f.__name__.replace("_", "-"): {"reference": staticmethod(f)}
        for f in (softmax_router, sigmoid_router, expert_choice_router, mixture_of_experts, gated_delta_net, mamba2)
    },
}
