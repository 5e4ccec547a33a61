"""Quantized weight storage for serving, which takes a quarter (int8) or an eighth (int4) as much memory as float32."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import REQUIRED, Configurable, Node, interface, node, setting
from axlearn_core.errors import Problem, RequestError
from axlearn_core.nn.initializers import Constant, Initializer, VarianceScaling
from axlearn_core.nn.layer import Layer, Precision, expand_to
from axlearn_plugins_quantization.library import dequantize_weight, quantize_weight, stored_product
from axlearn_plugins_quantization.quantized_linear import contraction_dims

Storage = Literal["int8", "int4"]


class WeightOnlyLinear(Layer):
    """`x @ (weight * weight_scale) + bias` with integer weights and floating-point activations.

    It has no gradients. Train the dense model and convert it with `axlearn quantize`.
    """

    @node
    class Config(Layer.Config["WeightOnlyLinear"]):
        """Storage of the weights. All other fields are the same as the dense map's.

        Attributes:
            storage: Storage dtype.
            tile_size: Number of elements along the last input dimension that share a scale. None means all.
        """

        input_dims: tuple[int, ...] = interface(default=REQUIRED)
        output_dims: tuple[int, ...] = interface(default=REQUIRED)
        bias: bool = False
        init: Node[Initializer] = setting(default=VarianceScaling(), kind="training")
        storage: Storage = "int8"
        tile_size: int | None = setting(default=None, ge=1)

    def __init__(self, cfg: Config, *, axes: Sequence[str | None], rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        count, rank = len(cfg.input_dims), len(cfg.input_dims) + len(cfg.output_dims)
        if cfg.tile_size is not None and cfg.input_dims[-1] % cfg.tile_size:
            raise RequestError(
                f"tile_size={cfg.tile_size} does not divide the input dimension {cfg.input_dims[-1]} of a linear map\n"
                "    fix: choose a divisor of the input dimension, or remove tile_size"
            )
        shape = (*cfg.input_dims, *cfg.output_dims)
        make = cfg.init.build(axes=tuple(axes))
        dense = make(rngs.params(), shape, jnp.float32, in_axis=tuple(range(count)), out_axis=tuple(range(count, rank)))
        values, scales = self.quantize(dense)
        replicated = (None,) * count  # scales have few entries along the inputs, so every device has all of them
        self.weight = nnx.Param(values, out_sharding=tuple(axes), eager_sharding=False)
        self.weight_scale = nnx.Param(scales, out_sharding=(*replicated, *axes[count:]), eager_sharding=False)
        if cfg.bias:
            self.bias = self.parameter(rngs, Constant(), cfg.output_dims, tuple(axes)[count:])

    def quantize(self, dense: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Quantize the weight [*input_dims, *output_dims] of a dense map. Return (weight, weight_scale)."""
        return quantize_weight(dense, len(self.cfg.input_dims), self.cfg.storage, self.cfg.tile_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., *input_dims] -> [..., *output_dims]."""
        x = x.astype(self.precision.compute)
        dimensions = contraction_dims(x.ndim, len(self.cfg.input_dims))
        y = stored_product(x, self.weight[...], self.weight_scale[...], dimensions)
        return y + expand_to(self.computed(self.bias), y.ndim) if self.cfg.bias else y

    def grouped(self, x: jax.Array, product: Any) -> jax.Array:
        """See `axlearn_core.nn.linear.Linear.grouped`. The weights are converted to floating point for the matmul.

        Raises:
            RequestError: The mesh shards the inputs, but tiles of inputs have separate scales.
        """
        values, scales = self.weight[...], self.weight_scale[...]
        inputs, tiles = values.shape[-2], scales.shape[-2]
        if tiles > 1 and tiles * (self.cfg.tile_size or 0) != inputs:
            raise RequestError(
                f"weight-only experts: the mesh shards the inputs ({inputs} per device), but {tiles} tiles have scales\n"
                "    fix: add --set mesh.rules.mlp=[] to replicate the inputs, or quantize without --tile-size"
            )
        y = product(x.astype(self.precision.compute), dequantize_weight(values, scales, self.precision.compute))
        return y + product.spread(self.computed(self.bias), y) if self.cfg.bias else y


class NoLearner(Configurable):
    """A learner for models that cannot be trained. It has no state."""

    @node
    class Config(Configurable.Config["NoLearner"]):
        """Config without fields."""

        def validate(self) -> Iterable[Problem]:
            """Report no problems."""
            return ()

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def check_training(self) -> None:
        """Raise `RequestError`; see `axlearn_core.contracts.capabilities.ChecksTraining`."""
        raise self._error()

    def init(self, params: Any) -> Any:
        """Return an empty state."""
        return {}

    def evaluation_params(self, state: Any, params: Any) -> Any:
        """Return the parameters."""
        return params

    def value_and_grad(self, loss: Any, params: Any, variables: Any, batch: Any, key: Any) -> Any:
        """Raise `RequestError`."""
        raise self._error()

    @staticmethod
    def _error() -> RequestError:
        return RequestError(
            "this model cannot be trained: its weights are stored as integers\n"
            "    fix: train the original run, and quantize it again"
        )

    def update(self, grads: Any, state: Any, params: Any, loss: jax.Array) -> Any:
        """Raise `RequestError`."""
        raise self._error()
