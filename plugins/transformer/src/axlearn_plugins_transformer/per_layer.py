"""Per-layer embeddings: a small vector for each token and layer, which the layer adds through a gate (Gemma 3n, Gemma 4).

Legend: B rows, S positions, D width, L layers, P size of a per-layer embedding.
"""

from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import REQUIRED, Node, interface, node, setting
from axlearn_core.errors import RequestError
from axlearn_core.nn.initializers import Normal
from axlearn_core.nn.layer import Layer, Precision
from axlearn_core.nn.linear import Linear, Projection
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_transformer.embedding import Embedding, TokenEmbedding
from axlearn_plugins_transformer.kernels.gated_linear_unit import Activation, ActivationFunction, activation_function
from axlearn_plugins_transformer.norm import Norm, RMSNorm

PER_LAYER = "per_layer"
"""Name of the inputs in `Context.layer_inputs`."""


class PerLayerInputs(Protocol):
    """Computes an input for each layer from the tokens.

    It is built with `vocab_size`, `input_dim`, `num_layers`, `rngs` and `precision`.
    """

    def __call__(self, tokens: jax.Array, embeddings: jax.Array) -> jax.Array:
        """Return the inputs of the layers: int32 [B, S] and [B, S, D] -> [B, L, S, P]."""
        ...


class PerLayerEmbedding(Layer):
    """Per-layer embeddings: half from a table of tokens, and half projected from the token embeddings.

    It computes `(sqrt(P) * table(token) + norm(project(embedding) / sqrt(D))) / sqrt(2)`.
    """

    @node
    class Config(Layer.Config["PerLayerEmbedding"]):
        """Settings for the embeddings.

        Attributes:
            dim: P.
            num_tokens: Number of tokens that have a row in the table; later ones use the row of token 0 (Gemma 3n). None gives all
                tokens a row.
            embedding: Table of tokens. It has a row of L P numbers per token.
            projection: Projection of the token embeddings.
            norm: Norm of each projected vector.
        """

        vocab_size: int = interface(default=REQUIRED)
        input_dim: int = interface(default=REQUIRED)
        num_layers: int = interface(default=REQUIRED)
        dim: int = setting(default=256, ge=1)
        num_tokens: int | None = setting(default=None, ge=1, hide_default=True)
        embedding: Node[TokenEmbedding] = Embedding.Config(init=Normal(stddev=0.02))
        projection: Node[Projection] = Linear.Config()
        norm: Node[Norm] = RMSNorm.Config()

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        size = cfg.num_layers * cfg.dim
        self.num_tokens = cfg.vocab_size if cfg.num_tokens is None else cfg.num_tokens
        self.embedding = self.child(cfg.embedding, rngs=rngs, vocab_size=self.num_tokens, dim=size)
        sizes = {"input_dims": (cfg.input_dim,), "output_dims": (size,), "axes": ("embed", "mlp")}
        self.projection = self.child(cfg.projection, rngs=rngs, **sizes)
        self.norm = self.child(cfg.norm, rngs=rngs, dim=cfg.dim)

    def __call__(self, tokens: jax.Array, embeddings: jax.Array) -> jax.Array:
        """Return the inputs of the layers; see `PerLayerInputs`."""
        cfg = self.cfg

        def split(x: jax.Array) -> jax.Array:
            return x.reshape(*x.shape[:2], cfg.num_layers, cfg.dim)

        if cfg.num_tokens is not None:
            tokens = jnp.where(tokens < self.num_tokens, tokens, 0)
        projected = self.norm(split(self.projection(embeddings) * cfg.input_dim**-0.5))
        return jnp.moveaxis((projected + split(self.embedding(tokens)) * cfg.dim**0.5) * 0.5**0.5, 2, 1)


class PerLayerGate(Layer):
    """Adds a layer's own input to the residual stream, through a gate.

    It computes `norm(project(activation(gate(x)) * input))`.
    """

    @node
    class Config(Layer.Config["PerLayerGate"]):
        """Settings for the gate.

        Attributes:
            dim: P.
            activation: Activation function: a name, or a node.
            gate: Gate projection, from D to P.
            project: Projection from P to D.
            norm: Norm of the result, or None.
        """

        input_dim: int = interface(default=REQUIRED)
        dim: int = setting(default=256, ge=1)
        activation: Activation | Node[ActivationFunction] = "gelu_tanh"
        gate: Node[Projection] = Linear.Config()
        project: Node[Projection] = Linear.Config()
        norm: Node[Norm] | None = RMSNorm.Config()

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        width, size = (cfg.input_dim,), (cfg.dim,)
        self.gate = self.child(cfg.gate, rngs=rngs, input_dims=width, output_dims=size, axes=("embed", "mlp"))
        self.project = self.child(cfg.project, rngs=rngs, input_dims=size, output_dims=width, axes=("mlp", "embed"))
        if cfg.norm is not None:
            self.norm = self.child(cfg.norm, rngs=rngs, dim=cfg.input_dim)

    def __call__(self, x: jax.Array, layer_inputs: Mapping[str, jax.Array]) -> jax.Array:
        """Return the vectors to add, [B, S, D].

        Args:
            x: Residual stream, [B, S, D].
            layer_inputs: `Context.layer_inputs`, with the layer's input [B, S, P] as `per_layer`.

        Raises:
            RequestError: The decoder computes no such input, or one of another size.
        """
        value, size = layer_inputs.get(PER_LAYER), self.cfg.dim
        if value is None or value.shape[-1] != size:
            got = "no per-layer inputs" if value is None else f"per-layer inputs of size {value.shape[-1]}"
            raise RequestError(
                f"a per-layer gate needs an input of size {size} for each layer\n    got: {got}\n"
                f"    fix: set decoder.per_layer to {{type: per-layer-embedding, dim: {size}}}"
            )
        hidden = activation_function(self.cfg.activation)(self.gate(x)) * value
        y = self.project(constrain(hidden, "batch", "sequence", "activation_mlp"))
        return y if self.cfg.norm is None else self.norm(y)
