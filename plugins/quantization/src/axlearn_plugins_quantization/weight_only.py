"""Weights that are stored quantized, for serving: they take a quarter or an eighth of the memory of float32."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import REQUIRED, Configurable, Node, interface, node, setting
from axlearn_core.errors import Problem, RequestError
from axlearn_core.nn.initializers import Constant, Initializer, VarianceScaling
from axlearn_core.nn.layer import Layer, Precision, expand_to
from axlearn_plugins_quantization.library import dequantized, quantized, stored_product
from axlearn_plugins_quantization.quantized_linear import contracted

Storage = Literal["int8", "int4"]


class WeightOnlyLinear(Layer):
    """`x @ (weight * weight_scale) + bias`, where `weight` holds small integers; activations stay as they are.

    It has no gradients: train the dense model, and store it so afterwards (`axlearn quantize`).
    """

    @node
    class Config(Layer.Config["WeightOnlyLinear"]):
        """The storage; every other field is of the dense map that it stands for.

        Attributes:
            storage: the integers.
            tile_size: how many numbers along the last input dimension share a scale; None: all of them.
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
                "    fix: take a divisor of it, or none"
            )
        shape = (*cfg.input_dims, *cfg.output_dims)
        make = cfg.init.build()
        dense = make(rngs.params(), shape, jnp.float32, in_axis=tuple(range(count)), out_axis=tuple(range(count, rank)))
        values, scales = self.quantized(dense)
        whole = (None,) * count  # a scale has few entries along the inputs: each device keeps all of them
        self.weight = nnx.Param(values, out_sharding=tuple(axes), eager_sharding=False)
        self.weight_scale = nnx.Param(scales, out_sharding=(*whole, *axes[count:]), eager_sharding=False)
        if cfg.bias:
            self.bias = self.parameter(rngs, Constant(), cfg.output_dims, tuple(axes)[count:])

    def quantized(self, dense: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(weight, weight_scale) for the weight of a dense map [*input_dims, *output_dims]."""
        return quantized(dense, len(self.cfg.input_dims), self.cfg.storage, self.cfg.tile_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., *input_dims] -> [..., *output_dims]."""
        x = x.astype(self.precision.compute)
        dimensions = contracted(x.ndim, len(self.cfg.input_dims))
        y = stored_product(x, self.weight[...], self.weight_scale[...], dimensions)
        return y + expand_to(self.computed(self.bias), y.ndim) if self.cfg.bias else y

    def grouped(self, x: jax.Array, product: Any) -> jax.Array:
        """See `axlearn_core.nn.linear.Linear.grouped`. The weights are made floating-point for the product.

        Raises:
            RequestError: a device has a part of the inputs, and tiles of them have scales of their own.
        """
        values, scales = self.weight[...], self.weight_scale[...]
        inputs, tiles = values.shape[-2], scales.shape[-2]
        if tiles > 1 and tiles * (self.cfg.tile_size or 0) != inputs:
            raise RequestError(
                f"stored experts: the mesh splits inputs ({inputs} are here) that {tiles} tiles have scales for\n"
                "    fix: --set mesh.rules.mlp=[] keeps them whole; or quantize without --tile-size"
            )
        y = product(x.astype(self.precision.compute), dequantized(values, scales, self.precision.compute))
        return y + product.spread(self.computed(self.bias), y) if self.cfg.bias else y


class NoLearner(Configurable):
    """In the place of the learner of a model that only serves: keeps no state, and trains nothing."""

    @node
    class Config(Configurable.Config["NoLearner"]):
        """Nothing to set."""

        def validate(self) -> Iterable[Problem]:
            """Nothing to check."""
            return ()

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def init(self, params: Any) -> Any:
        """No state."""
        return {}

    def evaluation_params(self, state: Any, params: Any) -> Any:
        """The parameters."""
        return params

    def value_and_grad(self, loss: Any, params: Any, variables: Any, batch: Any, key: Any) -> Any:
        """Raises `RequestError`."""
        raise self._refusal()

    @staticmethod
    def _refusal() -> RequestError:
        return RequestError(
            "this model cannot be trained: its weights are stored as integers\n"
            "    fix: train the run that it was made from, and quantize again"
        )

    def update(self, grads: Any, state: Any, params: Any, loss: jax.Array) -> Any:
        """Raises `RequestError`."""
        raise self._refusal()
