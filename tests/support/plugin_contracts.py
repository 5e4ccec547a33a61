"""Contracts that this repository's plugins define, and formulas of layers that cannot be tested with finite differences.

The output of a routed layer jumps when a token changes its experts. The gradients of a quantized layer ignore its rounding.
"""

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_plugins_models.vit.model import ImageClassifier
from axlearn_testing.contracts import B, Contract, D, S, context, like, normal

EXPERTS, TOP_K = 8, 2
IMAGES = normal(B, 8, 8, 3)


class OfImages(Contract):
    """Contracts of image models. They are called like text models, with other batches."""

    def fits(self, config):
        return type(config).owner is ImageClassifier


CONTRACTS = (
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


ANY_INPUTS = Contract(
    name="wrapped", arguments=("inputs",), offered={"input_dim": D}, inputs=normal(B, S, D), outputs=like(0)
)
"""Contract of a layer that passes its arguments through."""

REFERENCES = {
    "linen-layer": {"contract": ANY_INPUTS},
    "quantized-linear": {"reference": staticmethod(linear), "reference_tolerance": 0.02},
    **{
        f.__name__.replace("_", "-"): {"reference": staticmethod(f)}
        for f in (softmax_router, sigmoid_router, expert_choice_router, mixture_of_experts)
    },
}
