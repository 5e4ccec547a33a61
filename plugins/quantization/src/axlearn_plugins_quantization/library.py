"""All calls to qwix. Quantized layers import it when they are first built, because the import takes a second."""

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
"""Dimension numbers of `jax.lax.dot_general`: ((lhs contracted, rhs contracted), (lhs batch, rhs batch))."""


@functools.cache
def load() -> tuple[Any, Any, Any]:
    """Import qwix. Return (package, module with training matmuls, module with grouped matmuls).

    Raises:
        PluginError: qwix is missing, or does not work with the installed versions of JAX and Flax.
    """
    try:
        import qwix

        dot_general_qt, ragged_dot_qt = quantized_products()
    except (ImportError, AttributeError, TypeError) as error:  # typical errors with an incompatible JAX version
        import importlib_metadata

        versions = {d: _version(importlib_metadata, d) for d in ("qwix", "jax", "flax")}
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        raise PluginError(
            f"quantization needs qwix, which cannot be imported: {error}\n    installed: {listed}\n"
            '    fix: install "qwix>=0.1.8,<0.2" and a version of JAX that it supports, or remove quantization'
        ) from error
    return qwix, dot_general_qt, ragged_dot_qt


def _version(metadata: Any, name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"


@attrs.frozen
class Rule:
    """Quantization of a matmul between activations and weights. Converts to a `qwix.QtRule`.

    Attributes:
        weights: Dtype of the weights.
        activations: Dtype of the activations. None leaves both the activations and the matmul in floating point.
        gradients: Dtype of the gradients in both matmuls of the backward pass. None does not quantize these matmuls.
        tile_size: Number of elements along the last contracted dimension that share a scale. None means all.
    """

    weights: str
    activations: str | None
    gradients: str | None
    tile_size: int | None = None

    def to_qwix(self) -> Any:
        """Convert to a `qwix.QtRule`."""
        return load()[0].QtRule(
            weight_qtype=self.weights,
            act_qtype=self.activations,
            bwd_qtype=self.gradients,
            tile_size=self.tile_size,
        )


@functools.cache
def product(rule: Rule, dimensions: Dimensions) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return a function `(activations, weights) -> product` for a rule, with qwix's gradients."""
    dot, config = load()[1], _config(rule)

    def plain(x: jax.Array, weight: jax.Array) -> jax.Array:
        return dot.dot_general_qt(x, weight, dimensions, config)

    return _with_standard_promotion(plain)


@functools.cache
def delayed_product(rule: Rule, dimensions: Dimensions) -> Callable[..., jax.Array]:
    """Return a function for a rule with one scale per operand.

    It maps `(activations, weights, magnitude of activations, magnitude of weights) -> product`. A magnitude, float32 [], is
    scaled to the largest number of the dtype. Larger values saturate.
    """
    dot, config = load()[1], _config(rule)
    one_scale = {f"{side}_disable_channelwise_axes": True for side in ("lhs", "rhs", "dlhs_grad", "drhs_grad")}

    def plain(x: jax.Array, weight: jax.Array, x_magnitude: jax.Array, weight_magnitude: jax.Array) -> jax.Array:
        stats = {
            "lhs_collect_quant_stat": _calibrate_to(x_magnitude),
            "rhs_collect_quant_stat": _calibrate_to(weight_magnitude),
        }
        return dot.dot_general_qt(x, weight, dimensions, dataclasses.replace(config, **one_scale, **stats))

    return _with_standard_promotion(plain)


def _calibrate_to(magnitude: jax.Array) -> Callable[[Any], Any]:
    """Return a function that replaces qwix's calibration of an operand with `magnitude`."""

    def calibrate(measured: Any) -> Any:
        absmax = measured["absmax"]
        return {"absmax": jnp.broadcast_to(magnitude, absmax.shape).astype(absmax.dtype)}

    return calibrate


@jax.tree_util.register_pytree_node_class
class _Bits:
    """An e4m3fn array stored as integers, for residuals of the backward pass.

    `jax.checkpoint` rounds residuals with `lax.reduce_precision`, which assumes that a dtype with four exponent bits ends at
    240. e4m3fn has no codes for infinities and reaches 448, so values above 240 would become NaN.
    """

    def __init__(self, bits: jax.Array):
        self.bits = bits

    @classmethod
    def from_array(cls, array: jax.Array) -> Any:
        """Return the bits of an e4m3fn array. Return other arrays unchanged."""
        return cls(jax.lax.bitcast_convert_type(array, jnp.uint8)) if array.dtype == jnp.float8_e4m3fn else array

    def value(self: Any) -> jax.Array:
        """Invert `from_array`. Also accepts a plain array."""
        return jax.lax.bitcast_convert_type(self.bits, jnp.float8_e4m3fn) if isinstance(self, _Bits) else self

    def tree_flatten(self) -> tuple[tuple[jax.Array], None]:
        """Flatten for JAX."""
        return (self.bits,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[jax.Array]) -> "_Bits":
        """Unflatten for JAX."""
        return cls(*children)


def _with_standard_promotion(plain: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    # qwix multiplies integers by floating-point scales in both passes, which strict dtype promotion forbids.
    @jax.custom_vjp
    def product(*args: jax.Array) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):
            return plain(*args)

    def forward(*args: jax.Array) -> tuple[jax.Array, Any]:
        with jax.numpy_dtype_promotion("standard"):
            y, pull = jax.vjp(plain, *args)
        return y, jax.tree.map(_Bits.from_array, pull)

    def backward(residuals: Any, gradient: jax.Array) -> Any:
        pull = jax.tree.map(_Bits.value, residuals, is_leaf=lambda x: isinstance(x, _Bits))
        with jax.numpy_dtype_promotion("standard"):
            return pull(gradient)

    product.defvjp(forward, backward)
    return product


def grouped_product(rule: Rule, x: jax.Array, weights: jax.Array, exact: Any) -> jax.Array:
    """Multiply rows by the weights of their groups, quantized according to a rule.

    Args:
        rule: The rule, without tiles.
        x: Rows, [G, ..., K], or [M, K] if the rows are sorted by group.
        weights: Weights, [G, K, N].
        exact: The floating-point grouped matmul. `exact.sizes` is the number of rows of each group in [M, K], int32 [G], or
            None.

    Raises:
        RequestError: The rule has tiles, or the config names a kernel for `exact`.
    """
    if rule.tile_size is not None or exact.kernel is not None:
        setting = "tile_size" if rule.tile_size is not None else f"the kernel {exact.kernel!r} of the dispatch"
        raise unsupported_for_experts(setting, "qwix uses one scale per output")
    if exact.sizes is None:
        return product(rule, (((x.ndim - 1,), (1,)), ((0,), (0,))))(x, weights)
    # Rows after the last group have arbitrary values, which must not affect the scales.
    used = jnp.arange(x.shape[0])[:, None] < jnp.sum(exact.sizes)
    x = jnp.where(used, x, 0)
    if rule.activations is None:
        y = _exact_backward(lambda x, w, n: jax.lax.ragged_dot(x, _round_trip(w, rule.weights), n))(
            x, weights, exact.sizes
        )
    elif rule.gradients is None:
        y = _exact_backward(_groups(rule))(x, weights, exact.sizes)
    else:
        y = _with_standard_promotion(_groups(rule))(x, weights, exact.sizes)
    return jnp.where(used, y, 0)


def unsupported_for_experts(setting: str, reason: str) -> RequestError:
    """Return the error for a setting that quantized experts do not support."""
    return RequestError(
        f"quantized experts: {setting} is not supported, because {reason}\n"
        "    fix: remove it, or set a quantization target without the experts"
    )


def _round_trip(weights: jax.Array, dtype: str) -> jax.Array:
    package = load()[0]
    with jax.numpy_dtype_promotion("standard"):
        return package.dequantize(package.quantize(weights, dtype, channelwise_axes=(0, 2))).astype(weights.dtype)


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
    """Return `forward` with the gradients of `jax.lax.ragged_dot`."""

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
    # The same conversion from a QtRule as in qwix's QtProvider. See `compat` for why the provider itself is not used.
    qwix_rule = rule.to_qwix()
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


def quantize_weight(weight: jax.Array, inputs: int, storage: str, tile_size: int | None) -> tuple[jax.Array, jax.Array]:
    """Quantize a weight [*input_dims, *output_dims]. Return (values, scales), with a scale for each output and tile of inputs.

    Weights that are small integers times a power of two, such as those of an MXFP4 file, stay exact.
    """
    array = load()[0].quantize(
        weight,
        storage,
        channelwise_axes=tuple(range(inputs, weight.ndim)),
        tiled_axes={} if tile_size is None else {inputs - 1: tile_size},
        scale_dtype="float32",
    )
    return _keep_exact(weight, array.qvalue, array.scale)


def _keep_exact(weight: jax.Array, values: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Use a power of two as the scale of each group whose weights are then integers, and the given values and scales elsewhere."""
    sizes = [size for pair in zip(scales.shape, weight.shape, strict=True) for size in (pair[0], pair[1] // pair[0])]
    within = tuple(range(1, len(sizes), 2))
    grouped = weight.astype(jnp.float32).reshape(sizes)
    largest = jnp.max(jnp.abs(grouped), axis=within)
    mantissa, exponent = jnp.frexp(largest / jnp.iinfo(values.dtype).max)
    exponent -= (mantissa == 0.5).astype(exponent.dtype)
    power = jnp.ldexp(jnp.float32(1), exponent)  # the smallest one with which all values fit
    integers = grouped / jnp.expand_dims(power, within)
    is_exact = jnp.isfinite(largest) & jnp.all(integers == jnp.round(integers), axis=within)
    exact = jnp.expand_dims(is_exact, within)
    stored = jnp.where(exact, integers, values.reshape(sizes).astype(jnp.float32)).reshape(weight.shape)
    return stored.astype(values.dtype), jnp.where(is_exact, power, scales)


def stored_product(x: jax.Array, values: jax.Array, scales: jax.Array, dimensions: Dimensions) -> jax.Array:
    """Multiply activations by a weight from `quantize_weight`. Return the product in the dtype of the activations."""
    package = load()[0]
    with jax.numpy_dtype_promotion("standard"):
        return package.dot_general(x, package.QArray(values, scales.astype(x.dtype)), dimensions)


def dequantize_weight(values: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """Convert a weight from `quantize_weight`, or a stack of them, to floating point."""
    package = load()[0]
    with jax.numpy_dtype_promotion("standard"):
        return package.dequantize(package.QArray(values, scales.astype(dtype))).astype(dtype)
