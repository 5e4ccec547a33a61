"""Exact and quantized linear maps, their products, and short trainings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import jaxprs_in_params

from axlearn_core.compose import compose
from axlearn_core.nn.layer import Precision

QUICK = {"xla_backend_optimization_level": 0}
FP8 = {"weights": "float8_e4m3fn", "activations": "float8_e4m3fn", "gradients": "float8_e5m2"}
INT8 = {"weights": "int8", "activations": "int8", "gradients": "int8"}


def build(cfg, inputs=(96,), outputs=(4, 32), axes=("embed", "heads", "head_dim")):
    return cfg.build(input_dims=inputs, output_dims=outputs, axes=axes, rngs=nnx.Rngs(0), precision=Precision())


def away(got, expected):
    return float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected))


def products(function, *args):
    """Return the operand dtypes of each product in a program, including nested ones."""
    results = []

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name in ("dot_general", "ragged_dot_general"):
                results.append(tuple(str(v.aval.dtype) for v in equation.invars[:2]))
            for inner in jaxprs_in_params(equation.params):
                visit(inner)

    visit(jax.make_jaxpr(function)(*args).jaxpr)
    return results


@functools.cache
def train(config, steps, devices=1):
    """Return losses on a partly learnable task: half of the tokens follow from the previous token, the others are random.

    The loss has a floor like the loss of text, so ratios of losses stay meaningful.
    """
    program = compose(config, jax.devices()[:devices])
    state, results = program.init(0), []
    follows = np.random.default_rng(3).permutation(64)
    for i in range(steps):
        dice = np.random.default_rng(i)
        rows = [dice.integers(0, 64, 8)]
        for _ in range(16):
            rows.append(np.where(dice.random(8) < 0.5, follows[rows[-1]], dice.integers(0, 64, 8)))
        tokens = np.stack(rows, axis=1).astype(np.int32)
        batch = program.put({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
        state, summary = program.train_step(state, batch)
        results.append(summary["loss"])
    return np.array([float(x) for x in results])


def far(got, expected):
    """Return the distance between two loss curves, as means over ten steps."""
    a, b = (x.reshape(-1, 10).mean(axis=1) for x in (got, expected))
    return float(np.abs(a / b - 1).max())
