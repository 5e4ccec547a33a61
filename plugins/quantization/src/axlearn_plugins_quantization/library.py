"""All calls of qwix. It is imported when a quantized layer is first built: that takes a second."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import attrs
import jax
import jax.numpy as jnp

from axlearn_core.errors import PluginError, RequestError
from axlearn_plugins_quantization.compat import quantized_products

Format = Literal["int8", "int4", "float8_e4m3fn", "float8_e5m2"]
Dimensions = Any
"""As `jax.lax.dot_general` takes them: ((lhs contracted, rhs contracted), (lhs batch, rhs batch))."""


@functools.cache
def load() -> tuple[Any, Any, Any]:
    """(the package, its module of products for training, that of products of groups).

    Raises:
        PluginError: qwix is missing, or does not work with the JAX and Flax that are installed.
    """
    try:
        import qwix

        dot_general_qt, ragged_dot_qt = quantized_products()
    except (ImportError, AttributeError, TypeError) as error:  # what a library raises that meets another JAX
        import importlib_metadata

        versions = {d: _version(importlib_metadata, d) for d in ("qwix", "jax", "flax")}
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        raise PluginError(
            f"quantization needs qwix, which cannot be imported: {error}\n    installed: {listed}\n"
            '    fix: install "qwix>=0.1.8,<0.2" beside a JAX that it supports, or leave quantization out'
        ) from error
    return qwix, dot_general_qt, ragged_dot_qt


def _version(metadata: Any, name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"


@attrs.frozen
class Rule:
    """How a product of activations and weights is computed; becomes a `qwix.QtRule`.

    Attributes:
        weights: the format of the weights.
        activations: of the activations; None leaves them, and the product is one of floating-point numbers.
        gradients: of the gradients in both products of the backward pass; None leaves those products as they are.
        tile_size: how many numbers along the last contracted dimension share a scale; None: all of them.
    """

    weights: str
    activations: str | None
    gradients: str | None
    tile_size: int | None = None

    def of_qwix(self) -> Any:
        """The rule in qwix's own terms."""
        return load()[0].QtRule(
            weight_qtype=self.weights,
            act_qtype=self.activations,
            bwd_qtype=self.gradients,
            tile_size=self.tile_size,
        )


@functools.cache
def product(rule: Rule, dimensions: Dimensions) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """`(activations, weights) -> product` by a rule, with qwix's gradients for it."""
    dot, config = load()[1], _config(rule)

    def plain(x: jax.Array, weight: jax.Array) -> jax.Array:
        return dot.dot_general_qt(x, weight, dimensions, config)

    return _loose(plain)


@functools.cache
def delayed_product(rule: Rule, dimensions: Dimensions) -> Callable[..., jax.Array]:
    """`(activations, weights, magnitude of activations, of weights) -> product`, with one scale for all of an operand.

    The magnitudes, float32 [], are those that the formats' largest numbers stand for; what is larger saturates.
    """
    dot, config = load()[1], _config(rule)
    one_scale = {f"{side}_disable_channelwise_axes": True for side in ("lhs", "rhs", "dlhs_grad", "drhs_grad")}

    def plain(x: jax.Array, weight: jax.Array, of_x: jax.Array, of_weight: jax.Array) -> jax.Array:
        stats = {"lhs_collect_quant_stat": _calibrate_to(of_x), "rhs_collect_quant_stat": _calibrate_to(of_weight)}
        return dot.dot_general_qt(x, weight, dimensions, dataclasses.replace(config, **one_scale, **stats))

    return _loose(plain)


def _calibrate_to(magnitude: jax.Array) -> Callable[[Any], Any]:
    """What takes qwix's own calibration of an operand, and gives one to `magnitude` in its place."""

    def calibrate(measured: Any) -> Any:
        of_qwix = measured["absmax"]
        return {"absmax": jnp.broadcast_to(magnitude, of_qwix.shape).astype(of_qwix.dtype)}

    return calibrate


@jax.tree_util.register_pytree_node_class
class _Bits:
    """An array of e4m3 as integers, for what the backward pass keeps.

    `jax.checkpoint` rounds what it keeps by `lax.reduce_precision`, to which four bits of exponent end at 240. In e4m3fn,
    which gives no codes to infinities, they go on to 448, and what is between became NaN.
    """

    def __init__(self, bits: jax.Array):
        self.bits = bits

    @classmethod
    def of(cls, array: jax.Array) -> Any:
        """`array`, as bits where it is of that format."""
        return cls(jax.lax.bitcast_convert_type(array, jnp.uint8)) if array.dtype == jnp.float8_e4m3fn else array

    def value(self: Any) -> jax.Array:
        """The inverse; also of an array."""
        return jax.lax.bitcast_convert_type(self.bits, jnp.float8_e4m3fn) if isinstance(self, _Bits) else self

    def tree_flatten(self) -> tuple[tuple[jax.Array], None]:
        """As JAX asks for it."""
        return (self.bits,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[jax.Array]) -> "_Bits":
        """As JAX asks for it."""
        return cls(*children)


def _loose(plain: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    # qwix multiplies integers by floating-point scales, forward and backward, which strict promotion forbids.
    @jax.custom_vjp
    def loose(*args: jax.Array) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):
            return plain(*args)

    def forward(*args: jax.Array) -> tuple[jax.Array, Any]:
        with jax.numpy_dtype_promotion("standard"):
            y, pull = jax.vjp(plain, *args)
        return y, jax.tree.map(_Bits.of, pull)

    def backward(residuals: Any, gradient: jax.Array) -> Any:
        pull = jax.tree.map(_Bits.value, residuals, is_leaf=lambda x: isinstance(x, _Bits))
        with jax.numpy_dtype_promotion("standard"):
            return pull(gradient)

    loose.defvjp(forward, backward)
    return loose


def grouped_product(rule: Rule, x: jax.Array, weights: jax.Array, exact: Any) -> jax.Array:
    """The product of rows with the weights of their groups, [G, K, N], by a rule.

    Args:
        rule: without tiles.
        x: [G, ..., K], or [M, K] where the rows of the groups follow one another.
        weights: [G, K, N].
        exact: the product in floating point; `exact.sizes` is int32 [G], the rows of each group in [M, K], or None.

    Raises:
        RequestError: the rule has tiles, or `exact` is to be taken by a kernel that the config names.
    """
    if rule.tile_size is not None or exact.kernel is not None:
        setting = "tile_size" if rule.tile_size is not None else f"the kernel {exact.kernel!r} of the dispatch"
        raise without_experts(setting, "qwix multiplies with one scale for each output")
    if exact.sizes is None:
        return product(rule, (((x.ndim - 1,), (1,)), ((0,), (0,))))(x, weights)
    # Rows behind the last group may hold anything, which must not get into the scales.
    used = jnp.arange(x.shape[0])[:, None] < jnp.sum(exact.sizes)
    x = jnp.where(used, x, 0)
    if rule.activations is None:
        y = _exact_backward(lambda x, w, n: jax.lax.ragged_dot(x, _round_trip(w, rule.weights), n))(
            x, weights, exact.sizes
        )
    elif rule.gradients is None:
        y = _exact_backward(_groups(rule))(x, weights, exact.sizes)
    else:
        y = _loose(_groups(rule))(x, weights, exact.sizes)
    return jnp.where(used, y, 0)


def without_experts(setting: str, reason: str) -> RequestError:
    """The error for a setting that the experts of a mixture do not have."""
    return RequestError(
        f"quantized experts: {setting} has no meaning for them, as {reason}\n"
        "    fix: leave it out, or give quantization a target without the experts"
    )


def _round_trip(weights: jax.Array, to: str) -> jax.Array:
    package = load()[0]
    with jax.numpy_dtype_promotion("standard"):
        return package.dequantize(package.quantize(weights, to, channelwise_axes=(0, 2))).astype(weights.dtype)


def _groups(rule: Rule) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    module = load()[2]
    config = module.RaggedDotQtConfig(
        lhs_qtype=rule.activations,
        rhs_qtype=rule.weights,
        dlhs_grad_qtype=rule.gradients,
        drhs_grad_qtype=rule.gradients,
    )
    return lambda x, weights, sizes: module.ragged_dot_qt(x, weights, sizes, config)


def _exact_backward(forward: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`forward`, with the gradients of `jax.lax.ragged_dot`."""

    @jax.custom_vjp
    def product(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):
            return forward(x, weights, sizes)

    def backward(residuals: Any, gradient: jax.Array) -> Any:
        x, weights, sizes = residuals
        return (*jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, sizes), x, weights)[1](gradient), None)

    product.defvjp(lambda *args: (product(*args), args), backward)
    return product


def _config(rule: Rule) -> Any:
    # As qwix's QtProvider makes it from a QtRule. The provider itself tells weights from activations by the frames of
    # the caller and by shapes, which errs where a batch has the shape of a weight; here it is known which is which.
    qwix_rule = rule.of_qwix()
    return load()[1].DotGeneralQtConfig(
        lhs_qtype=qwix_rule.act_qtype,
        rhs_qtype=qwix_rule.weight_qtype,
        tile_size=qwix_rule.tile_size,
        rhs_calibration_method=qwix_rule.weight_calibration_method,
        dlhs_grad_qtype=qwix_rule.bwd_qtype,
        drhs_grad_qtype=qwix_rule.bwd_qtype,
        dlhs_grad_calibration_method=qwix_rule.bwd_calibration_method,
        drhs_grad_calibration_method=qwix_rule.bwd_calibration_method,
        use_original_residuals=qwix_rule.bwd_qtype is None,
    )


def quantized(weight: jax.Array, inputs: int, storage: str, tile_size: int | None) -> tuple[jax.Array, jax.Array]:
    """(values, scales) of a weight [*input_dims, *output_dims]; a scale for each output, and for each tile of inputs."""
    array = load()[0].quantize(
        weight,
        storage,
        channelwise_axes=tuple(range(inputs, weight.ndim)),
        tiled_axes={} if tile_size is None else {inputs - 1: tile_size},
        scale_dtype="float32",
    )
    return array.qvalue, array.scale


def stored_product(x: jax.Array, values: jax.Array, scales: jax.Array, dimensions: Dimensions) -> jax.Array:
    """The product of activations and a weight that `quantized` made, in the dtype of the activations."""
    package = load()[0]
    with jax.numpy_dtype_promotion("standard"):
        return package.dot_general(x, package.QArray(values, scales.astype(x.dtype)), dimensions)


def dequantized(values: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """A weight that `quantized` made, or a stack of such, in floating point."""
    package = load()[0]
    with jax.numpy_dtype_promotion("standard"):
        return package.dequantize(package.QArray(values, scales.astype(dtype))).astype(dtype)
