"""Contracts that plugins of this repository define, and plain formulas of layers whose gradients are no derivatives."""

import jax.numpy as jnp

from axlearn_core.testing.contracts import B, Contract, D, S, normal

CONTRACTS = (
    Contract(
        name="router",
        arguments=("x",),
        offered={"input_dim": D, "num_experts": 8, "top_k": 2},
        inputs=normal(B, S, D),
    ),
)


def linear(params, x):
    """What a quantized linear map stands for."""
    return jnp.einsum("bsd,dnh->bsnh", x, params["weight"])


REFERENCES = {"quantized-linear": {"reference": staticmethod(linear), "reference_tolerance": 0.02}}
