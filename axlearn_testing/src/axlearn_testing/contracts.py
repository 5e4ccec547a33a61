"""Contracts of layers: the arguments of `build` and of the call, and the outputs.

The contract of a layer is derived from its declaration: the argument names of its method, and the interface fields that
it needs.

Test sizes: 8 rows B of 16 positions S, width D 32, 8 heads N of size H 8, vocabulary V 64, 8 experts.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axlearn_core.config import REQUIRED, Node
from axlearn_core.config.node import interface_fields
from axlearn_core.errors import ConfigError
from axlearn_core.nn.layer import Context, Precision

B, S, D, N, H, V = 8, 16, 32, 8, 8, 64
Inputs = Callable[[np.random.Generator], tuple[Any, ...]]


@attrs.frozen(kw_only=True)
class Contract:
    """The interface between a kind of layer and its parent.

    Attributes:
        name: Name of the contract.
        arguments: Names of the positional arguments that a parent passes to `method`.
        offered: Keyword arguments that a parent offers to `build`, in addition to `rngs` and `precision`.
        inputs: Function that makes the arguments, with floats in float32.
        outputs: `(inputs, compute dtype) -> tree of jax.ShapeDtypeStruct`, or None if the shapes are unspecified.
        method: Name of the method that the parent calls.
    """

    name: str
    arguments: tuple[str, ...]
    offered: Mapping[str, Any] = {}
    inputs: Inputs
    outputs: Callable[[tuple[Any, ...], Any], Any] | None = None
    method: str = "__call__"

    def build(self, config: Node[Any], precision: Precision = Precision(), seed: int = 0) -> Any:
        """Build the layer abstractly, without arrays."""
        return nnx.eval_shape(lambda: config.build(rngs=nnx.Rngs(seed), precision=precision, **self.offered))

    def fits(self, config: Node[Any]) -> bool:
        """Return whether the layer of a config has this contract."""
        kind = type(config)
        required = {a.name for a in attrs.fields(kind) if a.name in interface_fields(kind) and a.default is REQUIRED}
        if not required <= self.offered.keys():
            return False
        # A config usually builds an instance of its owner, but does not have to.
        try:
            method = self._find_method(kind.owner) or self._find_method(type(self.build(config)))
        except ConfigError:  # the contract does not offer everything that the layer needs
            return False
        if method is None:
            return False
        return tuple(inspect.signature(method).parameters)[1 : len(self.arguments) + 1] == self.arguments

    def _find_method(self, cls: Any) -> Any:
        return next((vars(c)[self.method] for c in cls.__mro__ if self.method in vars(c)), None)


def find_contract(config: Node[Any], contracts: Iterable[Contract] = ()) -> Contract | None:
    """Return the contract of a config's layer, from `contracts` and `CONTRACTS`, or None if none matches."""
    interface = interface_fields(type(config))
    matching = [c for c in (*contracts, *CONTRACTS) if c.fits(config)]
    # Prefer the most specific contract: a layer that is called with `tokens` and `context` is not an embedding.
    return max(matching, key=lambda c: (len(c.arguments), len(c.offered.keys() & interface)), default=None)


def normal(*shape: int) -> Inputs:
    """Return a function that makes one float32 input of the given shape."""
    return lambda rng: (rng.standard_normal(shape, np.float32),)


def tokens(rng: np.random.Generator) -> np.ndarray:
    """Return random tokens, int32 [B, S]."""
    return rng.integers(0, V, (B, S), np.int32)


def context(rng: np.random.Generator) -> Context:
    """Return a context with two documents in each row, each with its own positions."""
    cut = rng.integers(1, S, (B, 1))
    index = np.broadcast_to(np.arange(S), (B, S))
    positions = np.where(index < cut, index, index - cut)
    return Context(positions=jnp.asarray(positions, jnp.int32), segment_ids=jnp.asarray(1 + (index >= cut), jnp.int32))


def batch(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return a batch of a language model; see `axlearn_core.contracts.parts.Batch`."""
    ids, token_context = rng.integers(0, V, (B, S + 1), np.int32), context(rng)
    return {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "weights": (rng.random((B, S)) < 0.9).astype(np.float32),
        "segment_ids": np.asarray(token_context.segment_ids),
        "positions": np.asarray(token_context.positions),
    }


def like(index: int, *shape: int) -> Callable[[tuple[Any, ...], Any], Any]:
    """Return a function that gives the spec of an output: the shape of an input (or `shape`), in the compute dtype."""
    return lambda inputs, dtype: jax.ShapeDtypeStruct(shape or inputs[index].shape, dtype)


def _rotary_outputs(inputs: tuple[Any, ...], dtype: object) -> Any:
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs[:2])


def _mixer_outputs(inputs: tuple[Any, ...], dtype: object) -> Any:
    return jax.ShapeDtypeStruct((B, S, D), dtype), None


CONTRACTS = (
    Contract(name="model", arguments=("batch",), inputs=lambda rng: (batch(rng),), method="loss"),
    Contract(name="norm", arguments=("x",), offered={"dim": D}, inputs=normal(B, S, D), outputs=like(0)),
    Contract(
        name="projection",
        arguments=("x",),
        offered={"input_dims": (D,), "output_dims": (N, H), "axes": ("embed", "heads", "head_dim")},
        inputs=normal(B, S, D),
        outputs=like(0, B, S, N, H),
    ),
    Contract(name="feed-forward", arguments=("x",), offered={"input_dim": D}, inputs=normal(B, S, D), outputs=like(0)),
    Contract(
        name="embedding",
        arguments=("tokens",),
        offered={"vocab_size": V, "dim": D},
        inputs=lambda rng: (tokens(rng),),
        outputs=like(0, B, S, D),
    ),
    Contract(
        name="head",
        arguments=(),
        offered={"vocab_size": V, "dim": D},
        inputs=lambda rng: (),
        method="head_weight",
    ),
    Contract(
        name="position-encoding",
        arguments=("query", "key", "positions"),
        offered={"head_dim": H, "num_heads": N},
        inputs=lambda rng: (
            *(rng.standard_normal((B, S, n, H), np.float32) for n in (N, N // 2)),
            context(rng).positions,
        ),
        outputs=_rotary_outputs,
    ),
    Contract(
        name="layer",
        arguments=("x", "context"),
        offered={"input_dim": D},
        inputs=lambda rng: (*normal(B, S, D)(rng), context(rng)),
        outputs=_mixer_outputs,
    ),
    Contract(
        name="decoder",
        arguments=("tokens", "context"),
        offered={"vocab_size": V},
        inputs=lambda rng: (tokens(rng), context(rng)),
    ),
)
